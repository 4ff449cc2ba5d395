"""`quire chat`: turns, commands, and Ctrl-C."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys

import pytest

from tests.cli.conftest import Quire
from tests.cli.fake_server import FakeServer
from tests.tree import ROOT


def _chat(
    quire: Quire, server: FakeServer, monkeypatch: pytest.MonkeyPatch, *lines: str
) -> tuple[str, list[list[tuple[str, str]]]]:
    """What was printed, and the messages of each request."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    ended = quire("chat", "--system", "be kind", "--max-tokens", "2", "--server", server.address)
    assert ended.code == 0
    sent = [[(m.role, m.content) for m in request.chat.messages] for request in server.requests]
    return ended.out, sent


def test_each_turn_sends_the_whole_conversation(
    quire: Quire, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, sent = _chat(quire, server, monkeypatch, "one", "", "two", "/exit", "never")
    assert sent == [
        [("system", "be kind"), ("user", "one")],
        [("system", "be kind"), ("user", "one"), ("assistant", "w0 w1 "), ("user", "two")],
    ]
    assert out.count("w0 w1") == 2


def test_reset_forgets_all_but_the_system_message(
    quire: Quire, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, sent = _chat(quire, server, monkeypatch, "one", "/reset", "two")
    assert sent[1] == [("system", "be kind"), ("user", "two")]


def test_a_failed_turn_is_taken_back_and_the_chat_goes_on(
    quire: Quire, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, sent = _chat(quire, server, monkeypatch, "bad one", "two")
    assert "it is bad" in out
    assert sent[1] == [("system", "be kind"), ("user", "two")]


def test_ctrl_c_stops_the_answer_and_not_the_program(server: FakeServer) -> None:
    # Run in the background this process may ignore the signal, and a new one would inherit that.
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", "chat", "--server", server.address],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    signal.signal(signal.SIGINT, ours)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"endless\n")
    process.stdin.flush()
    printed = b""
    while b"w3" not in printed:
        printed += os.read(process.stdout.fileno(), 4096)
    process.send_signal(signal.SIGINT)
    assert server.cancelled.wait(10), "the server saw no cancel"
    rest, _ = process.communicate(b"go on\n/exit\n", timeout=20)
    assert process.returncode == 0
    assert b"[stopped]" in rest and b"Traceback" not in rest
    roles = [message.role for message in server.requests[1].chat.messages]
    assert roles == ["user", "assistant", "user"], "what was said stays in the conversation"
