"""Ids are used again: what comes late for an old request leaves the new one alone."""

from __future__ import annotations

from collections import Counter

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import RequestEvent, SequenceFinished
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.live_requests import LiveRequests
from shared.errors import QuireError
from shared.ids import RequestId
from shared.logprobs import Logprobs
from tests.core.driver import R1, Driver, make_request


class Sink:
    def __init__(self) -> None:
        self.events: list[RequestEvent] = []

    def append(
        self, sequence_index: int, token_id: int, now: float, logprobs: Logprobs | None
    ) -> None:
        raise AssertionError("no step ran")

    def deliver(self, event: RequestEvent, now: float) -> None:
        self.events.append(event)

    def fail(self, error: QuireError) -> None:
        raise AssertionError(error)


def joined_scheduler() -> Scheduler:
    driver = Driver(SchedulerConfig())
    driver.join(R1)
    return driver.scheduler


def test_a_stop_string_of_an_old_request_does_not_end_a_new_one_of_its_id() -> None:
    """FIELD-FAILURES, part 2: cancel and reuse at once, the new one completes."""
    scheduler = joined_scheduler()
    live = LiveRequests(scheduler, Counter())
    old, new = Sink(), Sink()
    request, name = make_request("again", 4), RequestId("again")
    scheduler.submit(request, 0.0)
    live.add(request, old)
    live.abandon(name, old)
    scheduler.submit(request, 0.0)
    live.add(request, new)
    live.stop(name, 0, old, 0.0)
    assert name in live
    assert new.events == []
    live.stop(name, 0, new, 0.0)
    assert [type(event) for event in new.events] == [SequenceFinished]
    assert name not in live
