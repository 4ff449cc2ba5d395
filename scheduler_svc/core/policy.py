"""Who goes first: the one order that the waiting queue and preemption both follow.

Because one total order serves both, a victim never stands before the sequence that it made room
for, and the first sequence in the order is never a victim: it always gets on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

OrderKey = tuple[float, int, int]
"""Sorts sequences; the smaller key goes first. The last two items make it unique."""


class SchedulingPolicy(Protocol):
    """Gives each sequence its place. A key is given once and never changes."""

    def order_key(
        self, priority: int, arrival_s: float, arrival_number: int, sequence_index: int
    ) -> OrderKey:
        """The place of a sequence; `arrival_number` counts requests."""


@dataclass(frozen=True, slots=True)
class AgedPriority:
    """First come, first served, where a step of priority is worth `ageing_s` of waiting.

    All requests age at one rate, so that ageing needs no updates: a request of priority p that
    came at time t stands where one of priority 0 from t - p * ageing_s would. One of priority 0
    is thus passed by one of priority p only if that came within p * ageing_s after it.
    """

    ageing_s: float

    def order_key(
        self, priority: int, arrival_s: float, arrival_number: int, sequence_index: int
    ) -> OrderKey:
        return (arrival_s - priority * self.ageing_s, arrival_number, sequence_index)
