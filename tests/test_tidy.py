"""House rules that eyes miss: nothing unsafe, nothing oversized, no path of one machine."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.tree import PACKAGES, ROOT, imports_of, python_files, tracked_files

PRODUCT = tuple(package for package in PACKAGES if package != "tests")
UNSAFE_MODULES = frozenset({"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"})
UNSAFE_NAMES = frozenset({"recv_pyobj", "send_pyobj", "trust_remote_code", "eval", "exec"})

MAX_LINES = 400
MAX_FUNCTION_LINES = 80
"""Hard limits; the aim is 250 and 50."""

HOME_PATH = re.compile(r"(?<![\w.$}])/(?:home|root|Users|work)/[\w.-]+")
BINARY = frozenset({".png", ".gguf", ".safetensors", ".ico"})


def unsafe_uses(file: Path, source: str) -> list[str]:
    """Every way into code execution by data, with its line."""
    found = [
        str(imported)
        for imported in imports_of(file, source)
        if imported.module.split(".", maxsplit=1)[0] in UNSAFE_MODULES
    ]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg in UNSAFE_NAMES:
            found.append(f"{file}:{node.value.lineno} passes {node.arg}")
        if not isinstance(node, ast.Call):
            continue
        name = _name_of(node.func)
        weights_only = any(
            keyword.arg == "weights_only"
            and isinstance(keyword.value, ast.Constant)
            and keyword.value.value is True
            for keyword in node.keywords
        )
        if name.split(".")[-1] in UNSAFE_NAMES and not _is_method_of_model(name):
            found.append(f"{file}:{node.lineno} calls {name}")
        if name == "torch.load" and not weights_only:
            found.append(f"{file}:{node.lineno} calls torch.load without weights_only=True")
    return found


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _is_method_of_model(name: str) -> bool:
    """`module.eval()` of torch switches a mode; only the built-in runs code."""
    return name.endswith((".eval", ".exec"))


def test_nothing_unpickles_or_runs_foreign_code() -> None:
    found = [
        use
        for file in python_files(*PRODUCT)
        for use in unsafe_uses(file, (ROOT / file).read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "socket.recv_pyobj()",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "load(path, trust_remote_code=True)",
        "eval(text)",
    ],
)
def test_a_planted_unsafe_use_is_found(source: str) -> None:
    """FIELD-FAILURES, part 4: pickle on sockets and code from model folders."""
    assert unsafe_uses(Path("planted.py"), source)


FORKS = frozenset({"os.fork", "os.forkpty", "pty.fork"})
FORKING = frozenset({Path("scheduler_svc/text/compile_helper.py")})
"""A process of its own, of one thread and without gRPC: see tests/text/test_compile_guard.py."""


def forking_uses(file: Path, source: str) -> list[str]:
    """Every way to fork this process without an exec right after."""
    found = [
        str(imported)
        for imported in imports_of(file, source)
        if imported.module.split(".", maxsplit=1)[0] == "multiprocessing"
    ]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _name_of(node.func) in FORKS:
            found.append(f"{file}:{node.lineno} calls {_name_of(node.func)}")
        if isinstance(node, ast.keyword) and node.arg == "preexec_fn":
            found.append(f"{file}:{node.value.lineno} passes preexec_fn")
    return found


def test_processes_are_spawned_and_never_forked() -> None:
    """FIELD-FAILURES, part 2: fork() after gRPC was used hangs."""
    found = [
        use
        for file in python_files(*PRODUCT)
        if file not in FORKING
        for use in forking_uses(file, (ROOT / file).read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source", ["import multiprocessing", "os.fork()", "Popen(command, preexec_fn=os.setsid)"]
)
def test_a_planted_fork_is_found(source: str) -> None:
    assert forking_uses(Path("planted.py"), source)


def test_safe_look_alikes_pass() -> None:
    assert not unsafe_uses(Path("ok.py"), "torch.load(p, weights_only=True)\nmodel.eval()")


def test_files_and_functions_fit_in_the_head() -> None:
    oversized = []
    for file in python_files(*PACKAGES):
        source = (ROOT / file).read_text()
        if source.count("\n") > MAX_LINES:
            oversized.append(f"{file}: {source.count(chr(10))} lines")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    oversized.append(f"{file}:{node.lineno} {node.name}: {length} lines")
    assert not oversized, "\n".join(oversized)


def test_no_file_names_a_path_of_one_machine() -> None:
    found = []
    for file in tracked_files():
        if file.suffix in BINARY or file == Path("tests/test_tidy.py"):
            continue
        for number, line in enumerate((ROOT / file).read_text(errors="replace").splitlines(), 1):
            if HOME_PATH.search(line):
                found.append(f"{file}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("line", ["open('/root/.cache/x')", "cd /home/ann/quire", "/Users/bob/m"])
def test_a_planted_home_path_is_found(line: str) -> None:
    assert HOME_PATH.search(line)
