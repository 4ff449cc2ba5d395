"""The processes that `quire serve` owns: starting, watching and ending one of them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

CHILD = Path(__file__).with_name("child.py")
QUIET_LIBRARIES = {"OPENBLAS_NUM_THREADS": "1"}
"""Numpy's own threads would spin through the start, and have nothing to do later."""

LineSink = Callable[[str, str], None]
"""Takes a process's name and one line that it printed; called from a thread of its own."""


class Child:
    """One process of ours. Its output goes line by line to `on_line`.

    It gets a session of its own, so that Ctrl-C in the terminal reaches `quire serve` alone, which
    then ends its children in order; and it dies with `quire serve` (see cli.child).
    """

    def __init__(self, name: str, module: str, arguments: Sequence[str], on_line: LineSink) -> None:
        self.name = name
        self.started_s = time.monotonic()
        self._last_line = ""
        self._on_line = on_line
        self._process = subprocess.Popen(
            # Isolated, and without site packages: it needs none, and starts in half the time.
            [sys.executable, "-I", "-S", CHILD, str(os.getpid()), module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            env={**QUIET_LIBRARIES, **os.environ},
        )
        self._pump = threading.Thread(target=self._pump_output, name=f"{name} output", daemon=True)
        self._pump.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number when one ended it."""
        return self._process.poll()

    def last_words(self) -> str:
        """The last line of an ended process: by our manners, the sentence that says why."""
        self._pump.join(timeout=2.0)
        return self._last_line

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended within `timeout_s`."""
        try:
            self._process.wait(max(timeout_s, 0.0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Ends it at once and reaps it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()

    def _pump_output(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if text := line.rstrip():
                    self._last_line = text
                    self._on_line(self.name, text)


@dataclass(slots=True)
class Backoff:
    """How long to wait before the next restart: twice as long each time, from the start again
    after a life of `reset_after_s`."""

    first_s: float = 1.0
    longest_s: float = 30.0
    reset_after_s: float = 60.0
    _next_s: float = 0.0

    def next_delay_s(self, lived_s: float) -> float:
        if lived_s >= self.reset_after_s or self._next_s == 0.0:
            self._next_s = self.first_s
        delay_s = self._next_s
        self._next_s = min(2.0 * delay_s, self.longest_s)
        return delay_s
