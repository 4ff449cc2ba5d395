"""`quire serve` in parts: ports, restarts, children that die with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli.errors import CommandError
from cli.processes import Backoff, Child
from cli.serve import Stop, _end_command, _flags, _with_port
from cli.supervisor import Fleet, Supervisor
from tests.cli.conftest import Quire
from tests.ipv6 import needs_ipv6
from tests.tree import ROOT


def test_an_option_that_was_not_given_is_not_passed_on() -> None:
    assert _flags(max_num_seqs=8, dtype=None) == ["--max-num-seqs", "8"]


def test_port_0_takes_a_free_port() -> None:
    host, _, port = _with_port("127.0.0.1:0").rpartition(":")
    assert host == "127.0.0.1" and 0 < int(port) < 65536
    assert _with_port("127.0.0.1:50051") == "127.0.0.1:50051"
    with pytest.raises(CommandError, match=r"is no host:port"):
        _with_port("localhost")
    with pytest.raises(CommandError, match=r"ports end at 65535"):
        _with_port("127.0.0.1:65536")


def test_ipv6_addresses_are_in_brackets() -> None:
    assert _with_port("[::1]:50051") == "[::1]:50051"
    with pytest.raises(CommandError, match=r"::1:50051 should be \[::1\]:50051"):
        _with_port("::1:50051")


@needs_ipv6
def test_port_0_takes_a_free_port_of_ipv6_too() -> None:
    address = _with_port("[::1]:0")
    host, _, port = address.rpartition(":")
    assert host == "[::1]" and 0 < int(port) < 65536
    with socket.create_server(("::1", int(port)), family=socket.AF_INET6):
        pass


def test_restarts_wait_longer_each_time_until_a_long_life() -> None:
    backoff = Backoff(first_s=1.0, longest_s=4.0, reset_after_s=60.0)
    assert [backoff.next_delay_s(lived_s=0.5) for _ in range(4)] == [1.0, 2.0, 4.0, 4.0]
    assert backoff.next_delay_s(lived_s=61.0) == 1.0


def test_a_childs_last_line_is_its_last_words(tmp_path: Path) -> None:
    lines: list[tuple[str, str]] = []
    child = Child(
        "probe",
        "timeit",
        ["-n", "1", "-r", "1", "print('why it ended')"],
        lambda name, line: lines.append((name, line)),
    )
    assert child.wait(20.0)
    assert child.exit_code() == 0
    assert child.last_words().startswith("1 loop")
    assert lines[0] == ("probe", "why it ended")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_child_dies_with_its_parent_even_by_kill_9() -> None:
    """FIELD-FAILURES, part 3: nothing that was spawned stays behind."""
    code = (
        "import time; from cli.processes import Child\n"
        "child = Child('c', 'timeit', ['-n', '1', 'import time; time.sleep(600)'], print)\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child_pid = int(parent.stdout.readline())
    while b"timeit" not in Path(f"/proc/{child_pid}/cmdline").read_bytes().split(b"\0")[2:3]:
        time.sleep(0.02)  # until it has become the module
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline_s = time.monotonic() + 10
    while _lives(child_pid):
        assert time.monotonic() < deadline_s, "the child outlived its parent"
        time.sleep(0.02)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_serve_refuses_settings_of_a_server_for_others(
    quire: Quire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "QUIRE_TOKEN_FILE", "tokens")
    ended = quire("serve", "--model", "m.gguf")
    assert ended.code == 2 and "QUIRE_TOKEN_FILE" in ended.err


STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def started(code: str) -> subprocess.Popen[bytes]:
    """A Python process that runs `code` and then sleeps, once it sleeps."""
    code += "; import time; print(flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as lines:
        assert lines.readline() == b"\n"
    return process


def test_a_command_that_ends_when_asked_is_not_killed() -> None:
    process = started("pass")
    _end_command(process, Stop())
    assert process.returncode == -signal.SIGTERM


def test_a_command_that_ignores_sigterm_is_killed_when_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cli.serve.COMMAND_STOP_S", 0.2)
    process = started(STUBBORN)
    _end_command(process, Stop(num_signals=1))
    assert process.returncode == -signal.SIGKILL


def test_a_second_signal_kills_a_stubborn_command_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.serve.COMMAND_STOP_S", 600.0)
    process = started(STUBBORN)
    _end_command(process, Stop(num_signals=2))
    assert process.returncode == -signal.SIGKILL


def test_workers_are_told_to_end_with_their_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """FIELD-FAILURES, part 3: the kernel's signal may come late to a worker that computes; its own
    watch ends it."""
    spawned: list[tuple[str, str, list[str]]] = []

    class FakeChild:
        def __init__(self, name: str, module: str, arguments: list[str], _on_line: object) -> None:
            spawned.append((name, module, list(arguments)))

    monkeypatch.setattr("cli.supervisor.Child", FakeChild)
    fleet = Fleet(["--a"], [["--b"], ["--c"]], shutdown_grace_s=1.0)
    Supervisor(fleet, lambda *_: None, print).start()
    assert spawned == [
        ("scheduler", "scheduler_svc", ["--a"]),
        ("worker-0", "worker_svc", ["--b", "--exit-with-parent"]),
        ("worker-1", "worker_svc", ["--c", "--exit-with-parent"]),
    ]
