"""The sequences that wait for a replica, in the policy's order, within limits."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice

from scheduler_svc.core.policy import COMMON_LANE, OrderKey, SchedulingPolicy
from scheduler_svc.core.request import Request, Sequence
from scheduler_svc.core.states import SequenceState

Lane = list[tuple[OrderKey, Sequence]]


class WaitingQueue:
    """Lanes sorted by order key, so that one that comes back stands where it stood before. What
    has run before waits in the common lane, ahead of every new request of a tenant's lane.

    Held sequences count as waiting, but aren't in the order: choices until their first sibling has
    computed the prompt, and all of a beam search but the one that it starts from.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._lanes: dict[str, Lane] = {COMMON_LANE: []}
        self._num_in_order = 0
        self._num_held = 0
        self.num_tokens = 0
        """Prompt tokens of all that wait, held ones included."""

    def __len__(self) -> int:
        return self._num_in_order + self._num_held

    def __iter__(self) -> Iterator[Sequence]:
        """By order key, without the held ones; the queue must not change meanwhile."""
        return (seq for _, seq in heapq.merge(*self._lanes.values()))

    def head(self, count: int) -> list[Sequence]:
        """The first `count` in order."""
        lanes = self._lanes
        first = [seq for _, seq in lanes[COMMON_LANE][:count]]
        if len(lanes) == 1:
            return first
        costs = {
            name: (seq.num_prompt_tokens for _, seq in lane)
            for name, lane in lanes.items()
            if name != COMMON_LANE
        }
        taken = dict.fromkeys(costs, 0)
        for name in islice(self._policy.turns(costs), count - len(first)):
            first.append(lanes[name][taken[name]][1])
            taken[name] += 1
        return first

    def num_before(self, seq: Sequence) -> int:
        """How many sequences wait before `seq` in its lane."""
        return bisect_left(self._lanes.get(self._lane_of(seq), []), (seq.key,))

    def num_tokens_before(self, seq: Sequence) -> int:
        """About how many prompt tokens wait before `seq` in its lane, where it needn't be yet."""
        if not len(self):
            return 0
        return self.num_before(seq) * self.num_tokens // len(self)

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
        del lane[bisect_left(lane, (seq.key,))]
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
            self._lanes[name] = []
            self._policy.enter(name)
        insort(self._lanes[name], (seq.key, seq))
        self._num_in_order += 1
        self.num_tokens += seq.num_prompt_tokens

    def _hold(self, seq: Sequence) -> None:
        seq.request.num_held += 1
        self._num_held += 1
        self.num_tokens += seq.num_prompt_tokens

    def _is_in_order(self, seq: Sequence) -> bool:
        lane = self._lanes.get(self._lane_of(seq), [])
        at = bisect_left(lane, (seq.key,))
        return at < len(lane) and lane[at][1] is seq

    def _lane_of(self, seq: Sequence) -> str:
        request = seq.request
        return COMMON_LANE if request.is_started else self._policy.lane(request.new.tenant)
