"""Until when requests must start, and which of them can't keep their deadlines."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection

from scheduler_svc.core.messages import FailureKind
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Request
from scheduler_svc.core.waiting_queue import WaitingQueue
from shared.errors import DeadlineExceeded

SHARE_MEMORY = 0.95
"""What the share of uncached tokens so far weighs beside a request that starts."""

MIN_SWEEP_SIZE = 256
"""Entries below which the heap is left alone."""


class Deadlines:
    """A heap of due times. Those of requests that have started or ended leave when they come up,
    or are swept out when the heap has doubled, so that it holds no ended request for long.

    A request is due when it must start at the latest: at the end of its queue timeout, or so long
    before its deadline as its prompt takes to compute. Estimates err towards hope: what is refused
    or dropped here could not have been served.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._sweep_size = MIN_SWEEP_SIZE
        self._uncached_share = 1.0

    def note_start(self, num_tokens: int, num_cached: int) -> None:
        """A request has started with so many tokens, of which caches held `num_cached`."""
        share = 1 - num_cached / num_tokens
        self._uncached_share += (1 - SHARE_MEMORY) * (share - self._uncached_share)

    def check(
        self, request: Request, usable: Collection[Replica], waiting: WaitingQueue, now: float
    ) -> None:
        """Raises DeadlineExceeded when what waits before a new request takes longer, by the rates
        of the `usable` replicas, than it can wait."""
        latest_s = latest_start_s(request, usable)
        if latest_s == math.inf:
            return
        num_ahead = self._uncached_share * waiting.num_tokens_before(request.sequences[0])
        tokens_per_s = sum(1 / replica.cost.token_s for replica in usable)
        start_s = now + num_ahead / tokens_per_s
        if start_s > latest_s:
            raise DeadlineExceeded(
                f"it could start in {start_s - now:.1f} s and must in {max(0, latest_s - now):.1f}"
            )

    def add(self, request: Request, usable: Collection[Replica]) -> None:
        """Watch a request that waits, if it has a deadline."""
        due_s = latest_start_s(request, usable)
        if due_s < math.inf:
            if len(self._heap) >= self._sweep_size:
                self._sweep()
            heapq.heappush(self._heap, (due_s, request.arrival_number, request))

    def next(self) -> float | None:
        """The first due time that can still pass; None if there is none."""
        while self._heap:
            due_s, _, request = self._heap[0]
            if _waits(request):
                return due_s
            heapq.heappop(self._heap)
        return None

    def is_due(self, now: float) -> bool:
        """Whether pop_due has something to look at."""
        return bool(self._heap) and self._heap[0][0] <= now

    def _sweep(self) -> None:
        self._heap = [entry for entry in self._heap if _waits(entry[2])]
        heapq.heapify(self._heap)
        self._sweep_size = max(MIN_SWEEP_SIZE, 2 * len(self._heap))

    def pop_due(self, usable: Collection[Replica], now: float) -> Request | None:
        """The next request that is too late to start. Caches and rates have changed since a due
        time was set, so that one may turn out to lie ahead."""
        while (due_s := self.next()) is not None and due_s <= now:
            request = heapq.heappop(self._heap)[2]
            if latest_start_s(request, usable) <= now:
                return request
            self.add(request, usable)
        return None


def _waits(request: Request) -> bool:
    return not request.is_started and not request.is_finished


def why_late(request: Request, now: float) -> tuple[FailureKind, str]:
    """What to tell of a request that is too late to start."""
    if request.start_by_s is not None and request.start_by_s <= now:
        return FailureKind.QUEUE_TIMEOUT, f"it waited {request.new.queue_timeout_s} s for its turn"
    message = f"it waits and can't begin its answer within {request.new.deadline_s:.1f} s"
    return FailureKind.DEADLINE, message


def latest_start_s(request: Request, usable: Collection[Replica]) -> float:
    """When `request` must start at the latest; infinite without a deadline."""
    latest_s = math.inf if request.start_by_s is None else request.start_by_s
    if request.end_by_s is None:
        return latest_s
    seq = request.sequences[0]
    num_tokens = len(seq.token_ids)
    prompt_s = [
        replica.cost.prefill_s(num_cached, num_tokens - num_cached)
        for replica in usable
        if replica.can_ever_hold(request.new, num_tokens)
        for num_cached in (replica.kv.find_prefix(seq).num_tokens,)
    ]
    return min(latest_s, request.end_by_s - min(prompt_s, default=0.0))
