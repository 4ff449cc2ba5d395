"""Threads that pass news on, and need not push others off a core to do so.

gRPC's poller hears of the end of each write. By default it takes the core from the event loop
that is about to write the next message, and gives it back some microseconds later, once for each
message; a patient one waits until the loop rests, and hears of all ends together.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def patient_threads() -> Iterator[None]:
    """Threads that start within preempt nobody when they wake up: SCHED_BATCH, which they inherit
    (man 7 sched). Where the system has or allows no such thing, or the process is scheduled in
    another way than most, they are like others."""
    is_patient = _change_policy("SCHED_OTHER", "SCHED_BATCH")
    try:
        yield
    finally:
        if is_patient:
            _change_policy("SCHED_BATCH", "SCHED_OTHER")


def _change_policy(old: str, new: str) -> bool:
    """Whether this thread, of policy `old`, is scheduled by `new` now."""
    try:
        if os.sched_getscheduler(0) != getattr(os, old):
            return False
        os.sched_setscheduler(0, getattr(os, new), os.sched_param(0))
    except (AttributeError, OSError):
        return False
    return True
