"""`quire serve` from outside: ready line, commands, restarts, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import PATIENCE_S, eventually
from tests.tree import ROOT

LOCAL = ("--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0")
QUIRE = (sys.executable, "-m", "cli")


def _descendants(pid: int) -> set[int]:
    """All processes below `pid`, by /proc."""
    found: set[int] = set()
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return found
    for child in map(int, children):
        found |= {child} | _descendants(child)
    return found


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _lives(pid: int) -> bool:
    return _command_line(pid) != ""  # a zombie has none


class Serving:
    """A `quire serve` and what it printed."""

    def __init__(self, model: Path, log: Path, *flags: str) -> None:
        self._log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [*QUIRE, "serve", "--model", str(model), *LOCAL, *flags],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        eventually(lambda: "Quire is ready" in self.printed(), 90.0, "ready", self.printed)
        self.children = _descendants(self.process.pid)

    def printed(self) -> str:
        return self._log.read_text()

    def pid_of(self, module: str) -> int:
        (pid,) = [pid for pid in self.children if f"-m {module}" in _command_line(pid)]
        return pid

    def all_gone(self) -> bool:
        return not any(_lives(pid) for pid in self.children)


@pytest.fixture
def serving(model_path: Path, tmp_path: Path) -> Iterator[Serving]:
    serving = Serving(model_path, tmp_path / "serve.log")
    try:
        yield serving
    finally:
        serving.process.kill()
        serving.process.wait()


def test_a_command_gets_a_server_of_its_own_and_its_exit_code_is_passed_on(
    model_path: Path,
) -> None:
    generate = " ".join(
        [*QUIRE, "generate", "'The capital of France is' --max-tokens 3 --temperature 0 --json"]
    )
    ended = subprocess.run(
        [*QUIRE, "serve", "--model", str(model_path), *LOCAL, "--",
         "sh", "-c", f"{generate} && exit 7"],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert ended.returncode == 7, ended.stderr
    assert "Paris" in json.loads(ended.stdout)["text"]
    assert ended.stderr.count("Quire is ready") == 1


def test_ctrl_c_stops_everything_and_is_no_failure(serving: Serving) -> None:
    assert len(serving.children) == 2
    serving.process.send_signal(signal.SIGINT)
    assert serving.process.wait(PATIENCE_S) == 0, serving.printed()
    assert serving.all_gone()


def test_a_dead_worker_is_reported_and_started_again(serving: Serving) -> None:
    os.kill(serving.pid_of("worker_svc"), signal.SIGKILL)
    eventually(
        lambda: "worker-0 was killed by signal 9; it starts again in 1 s" in serving.printed(),
        PATIENCE_S,
        "the death is told",
        serving.printed,
    )
    eventually(
        lambda: any(
            "-m worker_svc" in _command_line(pid) for pid in _descendants(serving.process.pid)
        ),
        PATIENCE_S,
        "another worker runs",
        serving.printed,
    )
    serving.children |= _descendants(serving.process.pid)
    serving.process.send_signal(signal.SIGTERM)
    assert serving.process.wait(PATIENCE_S) == 0, serving.printed()
    assert serving.all_gone()


def test_the_schedulers_death_ends_the_service(serving: Serving) -> None:
    """FIELD-FAILURES, part 3: the scheduler is killed: workers that were spawned exit."""
    os.kill(serving.pid_of("scheduler_svc"), signal.SIGKILL)
    assert serving.process.wait(PATIENCE_S) == 1
    assert "scheduler was killed by signal 9" in serving.printed()
    assert "Traceback" not in serving.printed() and serving.all_gone()


def test_kill_9_leaves_no_process_behind(serving: Serving) -> None:
    serving.process.kill()
    serving.process.wait()
    eventually(serving.all_gone, PATIENCE_S, "all children ended", serving.printed)
