"""The states of a sequence and the only ways between them.

         start                     preempt by swap
WAITING ------> RUNNING -------------------------> SWAPPED
   ^ ^             | |   <-------------------------   |
   | +-------------+ |          resume                |
   |  preempt, loss  v                                |
   |             FINISHED <---- (from every state)    |
   +--------------------------------------------------+
                   loss of the replica
"""

from __future__ import annotations

from enum import Enum


class SequenceState(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    """Not on a replica; starts by computing what no cache holds."""
    RUNNING = "running"
    """Has a handle and device blocks on a replica."""
    SWAPPED = "swapped"
    """Its blocks are in a replica's host pool."""
    FINISHED = "finished"
    """Ended, failed or aborted; nothing follows."""


_TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.RUNNING: frozenset(
        {SequenceState.WAITING, SequenceState.SWAPPED, SequenceState.FINISHED}
    ),
    SequenceState.SWAPPED: frozenset(
        {SequenceState.WAITING, SequenceState.RUNNING, SequenceState.FINISHED}
    ),
    SequenceState.FINISHED: frozenset(),
}


class IllegalTransition(AssertionError):
    """A defect of the scheduler: a sequence was to go where its state doesn't lead."""


def check_transition(current: SequenceState, target: SequenceState) -> None:
    """Raises IllegalTransition unless `current` leads to `target`."""
    if target not in _TRANSITIONS[current]:
        raise IllegalTransition(f"a sequence can't go from {current.value} to {target.value}")
