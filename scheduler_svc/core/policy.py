"""Who goes first: the order that the waiting queue and preemption follow.

A policy does two things. It gives each sequence a key for life: sequences of one lane wait in the
order of their keys, and preemption takes the last key that runs. Since keys never change, a victim
never stands before the sequence that it made room for, and the first one in order is never a
victim: it always gets on. And where it has several lanes, it says which lane's turn it is.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

OrderKey = tuple[float, int, int]
"""Sorts sequences; the smaller key goes first. The last two items make it unique."""

COMMON_LANE = ""
"""The lane that goes before all others, and the only one of policies that know no tenants."""


class PolicyKind(Enum):
    """The policies by the names that operators use."""

    FCFS = "fcfs"
    """First come, first served; priorities count for nothing."""
    PRIORITY = "priority"
    """By priority, with ageing."""
    FAIR = "fair"
    """Tenants take turns by weight; a tenant's own requests go by priority, with ageing."""


class SchedulingPolicy(Protocol):
    """Gives each sequence its place."""

    def order_key(
        self, priority: int, arrival_s: float, arrival_number: int, sequence_index: int
    ) -> OrderKey:
        """The place of a sequence in its lane; `arrival_number` counts requests."""

    def lane(self, tenant: str) -> str:
        """The lane in which new requests of `tenant` wait."""

    def enter(self, lane: str) -> None:
        """Something waits in a lane that was empty."""

    def charge(self, lane: str, num_tokens: int) -> None:
        """So many tokens were computed, or are about to be, for requests of `lane`."""

    def turns(self, costs: Mapping[str, Iterator[int]]) -> Iterator[str]:
        """The lanes in the order of their turns, each as often as it has sequences. `costs` gives
        the prompt tokens of each lane's sequences in their order."""


class _OneLane:
    """What a policy without tenants makes of lanes."""

    def lane(self, tenant: str) -> str:
        return COMMON_LANE

    def enter(self, lane: str) -> None:
        pass

    def charge(self, lane: str, num_tokens: int) -> None:
        pass

    def turns(self, costs: Mapping[str, Iterator[int]]) -> Iterator[str]:
        return (lane for lane, sequences in costs.items() for _ in sequences)


class FirstComeFirstServed(_OneLane):
    """By arrival alone."""

    def order_key(
        self, priority: int, arrival_s: float, arrival_number: int, sequence_index: int
    ) -> OrderKey:
        return (0.0, arrival_number, sequence_index)


@dataclass(slots=True)
class AgedPriority(_OneLane):
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


@dataclass(slots=True)
class FairShare(AgedPriority):
    """Tenants with waiting requests take turns, each `quantum_tokens` times its weight long.

    Deficit round robin (Shreedhar and Varghese, 1996) in the form for costs that are known only
    afterwards: a turn lasts until the quantum is used up, and what the last request takes beyond
    it counts against the next turns. A tenant's round is thus what it was served, over weight and
    quantum, rounded down; the lowest round goes first. Prompt tokens that no cache held count when
    a request starts, generated ones when it ends.

    Who comes back after a pause starts where the others are: nobody saves up by being idle.
    """

    quantum_tokens: int = 2048
    weights: Mapping[str, float] = field(default_factory=dict)
    """Shares by tenant; 1 for a tenant without one."""
    _served: dict[str, float] = field(default_factory=dict)
    """Tokens over weight, by tenant."""
    _floor: float = 0.0
    """Where the tenant stood that started last: what newcomers begin with."""

    def lane(self, tenant: str) -> str:
        return tenant

    def enter(self, lane: str) -> None:
        self._served[lane] = max(self._served.get(lane, 0.0), self._floor)

    def charge(self, lane: str, num_tokens: int) -> None:
        served = self._served.get(lane, self._floor)
        self._floor = max(self._floor, served)
        self._served[lane] = served + num_tokens / self.weights.get(lane, 1.0)

    def turns(self, costs: Mapping[str, Iterator[int]]) -> Iterator[str]:
        turns = []
        for number, (lane, sequences) in enumerate(costs.items()):
            cost = next(sequences, None)
            if cost is not None:
                served = self._served[lane]
                turns.append((self._round(served), number, lane, served, cost))
        heapq.heapify(turns)
        while turns:
            _, number, lane, served, cost = turns[0]
            yield lane
            served += cost / self.weights.get(lane, 1.0)
            following = next(costs[lane], None)
            if following is None:
                heapq.heappop(turns)
            else:
                turn = (self._round(served), number, lane, served, following)
                heapq.heapreplace(turns, turn)

    def _round(self, served: float) -> int:
        return int(served // self.quantum_tokens)


def make_policy(
    kind: PolicyKind, *, ageing_s: float, weights: Mapping[str, float]
) -> SchedulingPolicy:
    """The policy of this kind."""
    match kind:
        case PolicyKind.FCFS:
            return FirstComeFirstServed()
        case PolicyKind.PRIORITY:
            return AgedPriority(ageing_s)
        case PolicyKind.FAIR:
            return FairShare(ageing_s, weights=weights)
