"""Order: priority, then arrival, with an ageing bound."""

from __future__ import annotations

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.policy import AgedPriority
from tests.core.driver import Driver, make_request


def test_priority_goes_before_arrival_and_arrival_before_choice() -> None:
    policy = AgedPriority(ageing_s=10.0)
    order = [
        policy.order_key(priority=1, arrival_s=5.0, arrival_number=3, sequence_index=0),
        policy.order_key(priority=0, arrival_s=0.0, arrival_number=1, sequence_index=0),
        policy.order_key(priority=0, arrival_s=0.0, arrival_number=1, sequence_index=1),
        policy.order_key(priority=0, arrival_s=0.0, arrival_number=2, sequence_index=0),
        policy.order_key(priority=-1, arrival_s=0.0, arrival_number=0, sequence_index=0),
    ]
    assert order == sorted(order)


def test_endless_high_priority_does_not_starve_a_low_one() -> None:
    """FIELD-FAILURES, part 1: low priority starves under endless high priority."""
    driver = Driver(SchedulerConfig(max_num_seqs=1, priority_ageing_s=10.0))
    driver.join()
    driver.submit(make_request("low", 4, max_tokens=2))
    for number in range(40):
        driver.submit(make_request(f"high{number}", 4, max_tokens=1, priority=2))
        driver.now += 1.0
        driver.step()
        if "low" in driver.started:
            break
    assert 20.0 <= driver.started["low"].started_s <= 22.0


def test_higher_priority_starts_first() -> None:
    driver = Driver(SchedulerConfig(max_num_seqs=1))
    driver.join()
    for name, priority in (("a", 0), ("b", 5), ("c", 5), ("d", 9)):
        driver.submit(make_request(name, 4, max_tokens=1, priority=priority))
    driver.run()
    assert list(driver.started) == ["d", "b", "c", "a"]
