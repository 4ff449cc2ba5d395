"""The contracts: clean by buf, and the generated code belongs to the .proto files beside it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.tree import ROOT

BUF = Path(sys.executable).parent / "buf"


def _run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_buf_lint_is_clean() -> None:
    lint = _run(BUF, "lint", cwd=ROOT / "protos")
    assert lint.returncode == 0, lint.stdout + lint.stderr


def test_buf_format_is_clean() -> None:
    formatted = _run(BUF, "format", "-d", "--exit-code", cwd=ROOT / "protos")
    assert formatted.returncode == 0, formatted.stdout + formatted.stderr


def test_a_field_without_comment_is_found(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    planted = tmp_path / "protos/quire/worker/v1/worker.proto"
    planted.write_text(planted.read_text() + "\n// Planted.\nmessage Planted { int32 bare = 1; }\n")
    assert _run(BUF, "lint", cwd=tmp_path / "protos").returncode != 0


def test_the_generated_code_is_fresh(tmp_path: Path) -> None:
    protos = sorted(path.relative_to(ROOT) for path in ROOT.glob("protos/quire/*/v1/*.proto"))
    assert protos
    out = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    protoc = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *out]
    generated = _run(*protoc, *protos, cwd=ROOT)
    assert generated.returncode == 0, generated.stderr
    fresh = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*_pb2*.py*")}
    assert len(fresh) == 3 * len(protos)
    stale = [
        str(path)
        for path, text in fresh.items()
        if not (ROOT / path).exists() or (ROOT / path).read_text() != text
    ]
    assert not stale, f"run `make proto`: {stale}"
