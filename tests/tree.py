"""The repository's own files, for the tests that read them."""

from __future__ import annotations

import ast
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MADE = {
    ".venv",
    "build",
    "node_modules",
    "__pycache__",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
}
PACKAGES = (
    "shared",
    "scheduler_svc",
    "worker_svc",
    "kernels",
    "quire_client",
    "cli",
    "bench",
    "deploy",
    "tests",
)


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module, by its full dotted name, and where."""

    file: Path  # relative to ROOT
    line: int
    module: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def python_files(*packages: str) -> Iterator[Path]:
    """Every Python file of these packages, relative to ROOT; generated code is left out."""
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "node_modules" not in path.parts:
                yield path.relative_to(ROOT)


def imports_of(file: Path, source: str) -> list[Import]:
    """Every import statement of `source`, at any depth. `from a import b` counts as a and as a.b,
    so that a rule on either name sees it; a relative import is resolved against `file`."""
    found = []
    for node in ast.walk(ast.parse(source, filename=str(file))):
        if isinstance(node, ast.Import):
            found += [Import(file, node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = file.parent.parts[: len(file.parent.parts) - node.level + 1]
                base = ".".join((*package, base) if base else package)
            found.append(Import(file, node.lineno, base))
            found += [Import(file, node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def tracked_files() -> list[Path]:
    """Every file that git knows, relative to ROOT; outside a checkout every file on disk."""
    listing = None
    if shutil.which("git"):
        listing = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    if listing is not None and listing.returncode == 0:
        files = [Path(name) for name in listing.stdout.split("\0") if name]
    else:
        on_disk = [path.relative_to(ROOT) for path in ROOT.rglob("*")]
        files = [path for path in on_disk if MADE.isdisjoint(path.parts)]
    return [file for file in files if (ROOT / file).is_file()]
