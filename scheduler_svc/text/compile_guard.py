"""Compiles strangers' grammars first in a process of its own, which may be lost.

    parent -- vocabulary, then one grammar after the other --> child
    parent <-- what is wrong with each, empty if nothing ----- child

llguidance bounds the work of a grammar well, but not all of it: some take seconds, and some use up
a thread's stack, which ends the process. The child may use MAX_COMPILE_CPU_S of processor time for
a grammar, MAX_MEMORY_BYTES of memory, and a stack that is smaller than any in the parent. What it
survives, the parent can compile as well. A lost child is replaced when the next grammar comes.

Frames are a length of four bytes, lowest first, and so many bytes.
"""

from __future__ import annotations

import json
import math
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import IO

from llguidance import LLTokenizer

from scheduler_svc.core.constraint import ConstraintBroken
from scheduler_svc.text.matcher import compile_grammar, make_tokenizer

MAX_COMPILE_CPU_S = 0.4
MAX_COMPILE_S = 5.0
"""On the clock, for a child that gets no processor time, or hangs."""
MAX_MEMORY_BYTES = 1 << 30
"""Above what the vocabulary takes."""
CHILD_STACK_BYTES = 1 << 20
START_S = 30.0
MAX_FRAME_BYTES = 1 << 28

Pipe = IO[bytes] | FileIO


class CompileGuard:
    """The parent's side; for one thread at a time. The child is started when first needed."""

    def __init__(self, token_bytes: Sequence[bytes], special_ids: Sequence[int]) -> None:
        self._token_bytes = token_bytes
        self._special_ids = special_ids
        self._child: subprocess.Popen[bytes] | None = None

    def check(self, grammar: str) -> str | None:
        """What is wrong with a grammar, or with the cost of it; None when it may be compiled."""
        child = self._running()
        assert child.stdin is not None and child.stdout is not None
        try:
            _write(child.stdin, grammar.encode())
            answer = _read_until(child.stdout, time.monotonic() + MAX_COMPILE_S)
        except OSError:
            answer = None
        if answer is None:
            self.close()
            return "compiling it takes too much time or memory"
        return answer.decode() or None

    def close(self) -> None:
        """Ends the child."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                assert pipe is not None
                pipe.close()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self.close()
        self._child = child = subprocess.Popen(
            [sys.executable, "-m", "scheduler_svc.text.compile_guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        assert child.stdin is not None and child.stdout is not None
        tokens = [token.hex() for token in self._token_bytes]
        _write(child.stdin, json.dumps([tokens, list(self._special_ids)]).encode())
        if _read_until(child.stdout, time.monotonic() + START_S) is None:
            raise RuntimeError("the process that compiles grammars doesn't start")
        return child


def _write(pipe: Pipe, content: bytes) -> None:
    left = memoryview(struct.pack("<I", len(content)) + content)
    while left:
        left = left[pipe.write(left) :]


def _read_until(pipe: Pipe, deadline_s: float) -> bytes | None:
    """A frame; None when the other side is gone or the deadline passes."""
    poller = select.poll()  # unlike select, it takes any number of open files
    poller.register(pipe, select.POLLIN)
    content, size = b"", 4
    while len(content) < size:
        left_s = deadline_s - time.monotonic()
        left_ms = None if math.isinf(left_s) else max(0.0, 1000 * left_s)
        part = pipe.read(size - len(content)) if poller.poll(left_ms) else b""
        if not part:
            return None
        content += part
        if len(content) == 4 and size == 4:
            size += min(struct.unpack("<I", content)[0], MAX_FRAME_BYTES)
    return content[4:]


# -- the child ------------------------------------------------------------------------------------


def main() -> None:
    """Answers on standard output until standard input ends, as it does when the parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent's to handle
    source, sink = FileIO(0, "rb"), FileIO(1, "wb")
    first = _read_until(source, time.monotonic() + START_S)
    if first is None:
        return
    tokens, special_ids = json.loads(first)
    tokenizer = make_tokenizer([bytes.fromhex(token) for token in tokens], special_ids)
    _limit_memory()
    _write(sink, b"")
    threading.stack_size(CHILD_STACK_BYTES)
    thread = threading.Thread(target=_answer_all, args=(source, sink, tokenizer, len(tokens)))
    thread.start()
    thread.join()


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    statm = Path("/proc/self/statm")
    if statm.exists():
        now = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MAX_MEMORY_BYTES,) * 2)


def _answer_all(source: Pipe, sink: Pipe, tokenizer: LLTokenizer, vocab_size: int) -> None:
    while (grammar := _read_until(source, math.inf)) is not None:
        # When it fires, the process ends by it.
        signal.setitimer(signal.ITIMER_PROF, MAX_COMPILE_CPU_S)
        reason = _reason_against(grammar.decode(), tokenizer, vocab_size)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _write(sink, reason.encode())


def _reason_against(grammar: str, tokenizer: LLTokenizer, vocab_size: int) -> str:
    try:
        compile_grammar(grammar, tokenizer, vocab_size, ())
    except ConstraintBroken as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
