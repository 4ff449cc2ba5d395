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
    (man 7 sched). Where the system has or allows no such thing they are like others."""
    try:
        policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except (AttributeError, OSError):
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, param)
