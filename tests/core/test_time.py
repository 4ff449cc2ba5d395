"""Time comes in as an argument: queue timeouts, and when the next tick is due."""

from __future__ import annotations

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import FailureKind
from shared.ids import RequestId
from tests.core.driver import Driver, make_request


def test_a_request_that_waits_too_long_fails() -> None:
    driver = Driver(SchedulerConfig(max_num_seqs=1))
    driver.join()
    driver.submit(make_request("running", 4, 20, queue_timeout_s=1.0))
    driver.step()
    driver.submit(make_request("waiting", 4, queue_timeout_s=3.0))
    assert driver.scheduler.next_tick() == 3.0
    driver.now = 2.9
    assert driver.scheduler.tick(driver.now) == []
    driver.now = 3.0
    driver.take(driver.scheduler.tick(driver.now))
    assert driver.failed == {"waiting": FailureKind.QUEUE_TIMEOUT}
    assert driver.scheduler.next_tick() is None
    driver.run()
    assert ("running", 0) in driver.ends


def test_a_timeout_of_an_ended_request_does_not_hit_a_new_one_of_its_name() -> None:
    driver = Driver()
    driver.join()
    driver.submit(make_request("a", 4, queue_timeout_s=1.0))
    driver.scheduler.abort(RequestId("a"))
    driver.submit(make_request("a", 4, queue_timeout_s=9.0))
    assert driver.scheduler.next_tick() == 9.0


def test_a_preempted_request_has_started_and_knows_no_timeout() -> None:
    driver = Driver(SchedulerConfig(reserve_fraction=0.0))
    driver.join(num_blocks=6)
    for number in range(2):
        driver.submit(make_request(f"r{number}", 30, 40, queue_timeout_s=1.0))
    while not driver.scheduler.counters.preemptions:
        driver.step()
    driver.now = 50.0
    assert driver.scheduler.next_tick() is None
    assert driver.scheduler.tick(driver.now) == []
    driver.run()
    assert not driver.failed
