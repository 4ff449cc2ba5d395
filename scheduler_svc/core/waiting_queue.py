"""The sequences that wait for a replica, in the policy's order, within limits."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import islice

from scheduler_svc.core.lane import Lane
from scheduler_svc.core.policy import COMMON_LANE, SchedulingPolicy
from scheduler_svc.core.request import Request, Sequence
from scheduler_svc.core.states import SequenceState


class WaitingQueue:
    """Lanes sorted by order key, so that one that comes back stands where it stood before. What
    has run before waits in the common lane, ahead of every new request of a tenant's lane.

    Held sequences count as waiting, but aren't in the order: choices until their first sibling has
    computed the prompt, and all of a beam search but the one that it starts from.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._lanes: dict[str, Lane] = {COMMON_LANE: Lane()}
        self._num_in_order = 0
        self._num_held = 0
        self.num_tokens = 0
        """Prompt tokens of all that wait, held ones included."""

    def __len__(self) -> int:
        return self._num_in_order + self._num_held

    def __iter__(self) -> Iterator[Sequence]:
        """By order key, without the held ones; the queue must not change meanwhile."""
        lanes = (lane.entries() for lane in self._lanes.values())
        return (seq for _, seq in heapq.merge(*lanes))

    def head(self, count: int) -> list[Sequence]:
        """The first `count` in order."""
        lanes = self._lanes
        first = list(islice(lanes[COMMON_LANE], count))
        if len(lanes) == 1:
            return first
        others = [name for name in lanes if name != COMMON_LANE]
        costs = {name: (seq.num_prompt_tokens for seq in lanes[name]) for name in others}
        sequences = {name: iter(lanes[name]) for name in others}
        turns = islice(self._policy.turns(costs), count - len(first))
        return first + [next(sequences[name]) for name in turns]

    def num_before(self, seq: Sequence) -> int:
        """How many sequences wait before `seq` in its lane, where it needn't be yet."""
        lane = self._lanes.get(self._lane_of(seq))
        return lane.before(seq.key).num_sequences if lane else 0

    def num_tokens_before(self, seq: Sequence) -> int:
        """How many prompt tokens certainly go before `seq`, which needn't wait yet: those before
        it in its lane, and the common lane. Other lanes' turns depend on what their running
        sequences will have generated; held choices have next to nothing to compute."""
        name = self._lane_of(seq)
        lane = self._lanes.get(name)
        num_own = lane.before(seq.key).num_tokens if lane else 0
        return num_own if name == COMMON_LANE else num_own + self._lanes[COMMON_LANE].num_tokens

    def add_request(self, request: Request) -> None:
        """A new request: its first sequence in order, the others held."""
        for seq in request.sequences[1:]:
            self._hold(seq)
        self._insert(request.sequences[0])

    def add(self, seq: Sequence) -> None:
        """`seq` waits, in order. One of a beam search is held, until all are: then the first one
        stands for them."""
        assert seq.state is SequenceState.WAITING
        request = seq.request
        if request.new.beam is None:
            self._insert(seq)
            return
        self._hold(seq)
        if request.num_held == len(request.sequences):
            self.take_held(request.sequences[0])
            self._insert(request.sequences[0])

    def take_held(self, seq: Sequence) -> None:
        """A held sequence is no longer."""
        seq.request.num_held -= 1
        self._num_held -= 1
        self.num_tokens -= seq.num_prompt_tokens

    def remove(self, seq: Sequence) -> None:
        """Take `seq` out; it must be in the order."""
        assert self._is_in_order(seq), "the sequence does not wait"
        name = self._lane_of(seq)
        lane = self._lanes[name]
        lane.remove(seq)
        if not lane and name != COMMON_LANE:
            del self._lanes[name]
        self._num_in_order -= 1
        self.num_tokens -= seq.num_prompt_tokens

    def start(self, seq: Sequence, num_new_tokens: int) -> None:
        """Take `seq` out to run; it has `num_new_tokens` to compute. Those that it computes again
        are not on its tenant's account."""
        self.remove(seq)
        if not seq.request.is_started:
            self._policy.charge(self._policy.lane(seq.request.new.tenant), num_new_tokens)

    def discard(self, seq: Sequence) -> None:
        """Take a waiting sequence out, whether it is held or in order."""
        if self._is_in_order(seq):
            self.remove(seq)
        else:
            self.take_held(seq)

    def release_held(self, request: Request) -> None:
        """The first sequence has computed the prompt: the others join the order."""
        if not request.num_held or request.new.beam is not None:
            return
        self._num_held -= request.num_held
        self.num_tokens -= request.num_held * request.num_prompt_tokens
        request.num_held = 0
        for seq in request.sequences[1:]:
            if seq.state is SequenceState.WAITING:
                self.add(seq)

    def _insert(self, seq: Sequence) -> None:
        name = self._lane_of(seq)
        if name not in self._lanes:
            self._lanes[name] = Lane()
            self._policy.enter(name)
        self._lanes[name].insert(seq)
        self._num_in_order += 1
        self.num_tokens += seq.num_prompt_tokens

    def _hold(self, seq: Sequence) -> None:
        seq.request.num_held += 1
        self._num_held += 1
        self.num_tokens += seq.num_prompt_tokens

    def _is_in_order(self, seq: Sequence) -> bool:
        lane = self._lanes.get(self._lane_of(seq))
        return lane is not None and seq in lane

    def _lane_of(self, seq: Sequence) -> str:
        request = seq.request
        return COMMON_LANE if request.is_started else self._policy.lane(request.new.tenant)
