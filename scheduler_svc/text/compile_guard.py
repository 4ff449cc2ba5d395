"""Compiles strangers' grammars first in a helper process, where they may cost what they like.

llguidance bounds the work of a grammar well, but not all of it: some take seconds, and some use up
a thread's stack, which ends the process. See `scheduler_svc.text.compile_helper`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from scheduler_svc.text.compile_helper import MAX_COMPILE_S, START_S, Verdict
from scheduler_svc.text.pipe_frames import read_frame, write_frame

GRACE_S = 1.0
"""For a helper to say that a child was too slow."""


class TooCostly(Exception):
    """A grammar took more memory or stack than it may."""


class OutOfTime(Exception):
    """A grammar took more processor time than it may."""


class TooSlow(Exception):
    """The machine was too busy to tell what a grammar takes."""


_ERRORS = {
    Verdict.OUT_OF_TIME: OutOfTime,
    Verdict.TOO_COSTLY: TooCostly,
    Verdict.TOO_SLOW: TooSlow,
}


class CompileGuard:
    """One helper, which is started when first needed; threads wait for each other."""

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_ids: Sequence[int],
        cpu_s: float,
        niceness: int = 0,
    ) -> None:
        """`cpu_s` is the processor time that a grammar may take, in seconds, and `niceness` how far
        the helper stands back for others, as of nice(1)."""
        self._token_bytes = token_bytes
        self._special_ids = special_ids
        self._limits = (str(cpu_s), str(niceness))
        self._helper: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def check(self, grammar: str) -> str | None:
        """What is wrong with a grammar; None when it may be compiled.

        Raises TooCostly, OutOfTime and TooSlow.
        """
        with self._lock:
            helper = self._running()
            assert helper.stdin is not None and helper.stdout is not None
            try:
                write_frame(helper.stdin, grammar.encode())
                answer = read_frame(helper.stdout, time.monotonic() + MAX_COMPILE_S + GRACE_S)
            except OSError:
                answer = None
            if not answer:
                self._end()
                raise TooSlow
        if answer[0] == Verdict.TOLD:
            return answer[1:].decode() or None
        raise _ERRORS[Verdict(answer[0])]

    def close(self) -> None:
        """Ends the helper, also while a thread waits for it."""
        if (helper := self._helper) is not None:
            _kill(helper)
        with self._lock:
            self._end()

    def _end(self) -> None:
        helper, self._helper = self._helper, None
        if helper is not None:
            _kill(helper)
            helper.wait()
            for pipe in (helper.stdin, helper.stdout):
                assert pipe is not None
                pipe.close()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._helper is not None and self._helper.poll() is None:
            return self._helper
        self._end()
        self._helper = helper = subprocess.Popen(
            [sys.executable, "-m", "scheduler_svc.text.compile_helper", *self._limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            process_group=0,  # a terminal's Ctrl-C is the scheduler's to handle
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # numpy is to start no threads there
        )
        assert helper.stdin is not None and helper.stdout is not None
        tokens = [token.hex() for token in self._token_bytes]
        write_frame(helper.stdin, json.dumps([tokens, list(self._special_ids)]).encode())
        if read_frame(helper.stdout, time.monotonic() + START_S) is None:
            self._end()
            raise RuntimeError("the process that compiles grammars doesn't start")
        return helper


def _kill(helper: subprocess.Popen[bytes]) -> None:
    """With its child, which has its pipes and would keep them until it has compiled."""
    if helper.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(helper.pid, signal.SIGKILL)
