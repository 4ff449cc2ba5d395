"""The process that compiles strangers' grammars first: what it loses, and when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scheduler_svc.text import compile_guard, grammar
from scheduler_svc.text.compile_guard import CompileGuard, OutOfTime, TooCostly, TooSlow
from scheduler_svc.text.pipe_frames import Pipe, read_frame

CPU_S = 0.5
SLOW = grammar.of_lark("start: A\nA: " + " & ".join(f"/.*a.{{{i % 20}}}/" for i in range(50)))
"""Takes seconds."""
DEEP = grammar.of_lark(
    "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(4000)), 'r4000: "a"'])
)
"""Uses up a stack."""


@pytest.fixture
def guard() -> Iterator[CompileGuard]:
    guard = CompileGuard([b"a", b"b"], [], CPU_S)
    yield guard
    guard.close()


def helper_of(guard: CompileGuard) -> subprocess.Popen[bytes]:
    assert guard.check(grammar.of_regex("a+")) is None
    assert guard._helper is not None
    return guard._helper


def child_of(helper: subprocess.Popen[bytes]) -> int:
    return int(Path(f"/proc/{helper.pid}/task/{helper.pid}/children").read_text())


def runs(pid: int) -> bool:
    """False also for what has ended and has nobody to wait for it."""
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(("source", "error"), [(SLOW, OutOfTime), (DEEP, TooCostly)])
def test_a_costly_grammar_costs_a_child_and_not_the_helper(
    guard: CompileGuard, source: str, error: type[Exception]
) -> None:
    helper = helper_of(guard)
    with pytest.raises(error):
        guard.check(source)
    assert guard.check(grammar.of_regex("c")) == "no text fulfils it"
    assert guard._helper is helper


def test_the_helper_has_one_thread_and_forks_safely(guard: CompileGuard) -> None:
    """FIELD-FAILURES, part 2: fork() after gRPC was used hangs."""
    helper = helper_of(guard)
    assert len(os.listdir(f"/proc/{helper.pid}/task")) == 1
    maps = Path(f"/proc/{helper.pid}/maps").read_text()
    assert "llguidance" in maps and "grpc" not in maps


def test_the_helper_ends_with_the_scheduler(guard: CompileGuard) -> None:
    """A scheduler that dies closes the pipe, and says nothing more."""
    helper = helper_of(guard)
    assert helper.stdin is not None
    helper.stdin.close()
    assert helper.wait(10) == 0
    assert guard.check(grammar.of_regex("c")) == "no text fulfils it", "another one takes its place"


def test_a_helper_that_gets_no_processor_time_is_given_up(
    guard: CompileGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = helper_of(guard)
    child = child_of(helper)
    os.kill(child, signal.SIGSTOP)
    monkeypatch.setattr(compile_guard, "MAX_COMPILE_S", 0.0)
    monkeypatch.setattr(compile_guard, "GRACE_S", 0.05)
    with pytest.raises(TooSlow):
        guard.check(grammar.of_regex("b+"))
    assert helper.poll() is not None, "it has ended"
    while runs(child):
        time.sleep(0.01)


def test_a_close_ends_what_is_compiled(
    guard: CompileGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child has the helper's pipes, so that the end of the helper alone would tell nobody."""
    child = child_of(helper_of(guard))
    os.kill(child, signal.SIGSTOP)
    waits = threading.Event()

    def read(pipe: Pipe, deadline_s: float) -> bytes | None:
        waits.set()
        return read_frame(pipe, deadline_s)

    monkeypatch.setattr(compile_guard, "read_frame", read)
    with ThreadPoolExecutor(1) as pool:
        checked = pool.submit(guard.check, grammar.of_regex("b+"))
        assert waits.wait(10)
        guard.close()
        with pytest.raises(TooSlow):
            checked.result()
    while runs(child):
        time.sleep(0.01)


def test_a_helper_that_does_not_start_in_time_is_given_up(
    guard: CompileGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(compile_guard, "START_S", 0.0)
        with pytest.raises(RuntimeError, match="doesn't start"):
            guard.check(grammar.of_regex("c"))
    assert guard.check(grammar.of_regex("c")) == "no text fulfils it", "another one takes its place"
