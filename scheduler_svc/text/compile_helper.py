"""The process in which strangers' grammars compile first; its arguments are the CPU seconds of
each, and how nice it is to other processes.

    guard -- vocabulary --> helper
    guard -- grammars ----> child, a fork of the helper; what is wrong with each --> guard
                            child lost? -- helper --> Verdict for the guard, and another child

A child may use so much processor time for a grammar, MAX_MEMORY_BYTES of memory, and a stack that
is smaller than any in the scheduler: what it survives, the scheduler can compile as well. Starting
a helper takes a third of a second, most of it for the vocabulary; a fork takes some milliseconds
and has it already, so that a lost child costs little but what it used.

The helper forks safely: it has one thread, and never had another, nor gRPC.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import resource
import signal
import sys
import time
from enum import IntEnum
from io import FileIO
from pathlib import Path

from llguidance import LLTokenizer

from scheduler_svc.core.constraint import ConstraintBroken
from scheduler_svc.text.matcher import compile_grammar, make_tokenizer
from scheduler_svc.text.pipe_frames import read_frame, write_frame

MAX_COMPILE_S = 5.0
"""On the clock, for a child that gets no processor time."""
MAX_MEMORY_BYTES = 1 << 30
"""Above what the vocabulary takes."""
STACK_BYTES = 1 << 20
START_S = 30.0


class Verdict(IntEnum):
    """First byte of an answer."""

    TOLD = 0
    """The child came to its end: what is wrong follows, empty if nothing."""
    OUT_OF_TIME = 1
    """It had its processor time."""
    TOO_COSTLY = 2
    """It was lost over the grammar in another way: by memory or stack."""
    TOO_SLOW = 3
    """It got too little processor time to tell."""


_BY_SIGNAL: dict[int, Verdict] = {
    signal.SIGPROF: Verdict.OUT_OF_TIME,
    signal.SIGALRM: Verdict.TOO_SLOW,
}
"""The signals of the timers, which end the child."""


def main(cpu_s: float, niceness: int) -> None:
    """Answers on standard output until standard input ends, as it does when the scheduler dies."""
    os.nice(niceness)
    source, sink = FileIO(0, "rb"), FileIO(1, "wb")
    first = read_frame(source, time.monotonic() + START_S)
    if first is None:
        return
    tokens, special_ids = json.loads(first)
    tokenizer = make_tokenizer([bytes.fromhex(token) for token in tokens], special_ids)
    vocab_size = len(tokens)
    del first, tokens
    _limit_memory()
    gc.freeze()  # children share what is here
    write_frame(sink, b"")
    has_grammar = mmap.mmap(-1, 1)  # shared: whether the child owes an answer
    while True:
        child = os.fork()
        if child == 0:
            try:
                _serve(source, sink, has_grammar, tokenizer, vocab_size, cpu_s)
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if not has_grammar[0]:
            return
        has_grammar[0] = 0
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        write_frame(sink, bytes([_BY_SIGNAL.get(number, Verdict.TOO_COSTLY)]))


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    statm = Path("/proc/self/statm")
    if statm.exists():
        now = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MAX_MEMORY_BYTES,) * 2)


def _serve(
    source: FileIO,
    sink: FileIO,
    has_grammar: mmap.mmap,
    tokenizer: LLTokenizer,
    vocab_size: int,
    cpu_s: float,
) -> None:
    """The child: answers until it is lost, or standard input ends."""
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, most))
    while (grammar := read_frame(source)) is not None:
        has_grammar[0] = 1
        signal.setitimer(signal.ITIMER_REAL, MAX_COMPILE_S)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        reason = _reason_against(grammar.decode(), tokenizer, vocab_size)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        has_grammar[0] = 0
        write_frame(sink, bytes([Verdict.TOLD]) + reason.encode())


def _reason_against(grammar: str, tokenizer: LLTokenizer, vocab_size: int) -> str:
    try:
        compile_grammar(grammar, tokenizer, vocab_size, ())
    except ConstraintBroken as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
