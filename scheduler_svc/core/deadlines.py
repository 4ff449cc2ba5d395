"""Until when requests must have started."""

from __future__ import annotations

import heapq

from scheduler_svc.core.request import Request


class Deadlines:
    """A heap of deadlines; those of requests that have started or ended leave when they come up."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []

    def add(self, request: Request) -> None:
        """Watch a new request, if it has a deadline."""
        if request.deadline_s is not None:
            heapq.heappush(self._heap, (request.deadline_s, request.arrival_number, request))

    def next(self) -> float | None:
        """The first deadline that can still pass; None if there is none."""
        while self._heap:
            deadline_s, _, request = self._heap[0]
            if not request.is_started and not request.is_finished:
                return deadline_s
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now: float) -> Request | None:
        """The next request whose deadline has passed."""
        deadline_s = self.next()
        if deadline_s is None or deadline_s > now:
            return None
        return heapq.heappop(self._heap)[2]
