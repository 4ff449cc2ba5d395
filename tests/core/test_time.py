"""Time comes in as an argument: queue timeouts, deadlines, and when the next tick is due."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import pytest

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import FailureKind
from scheduler_svc.core.policy import PolicyKind
from scheduler_svc.core.request import Request
from shared.errors import DeadlineExceeded
from shared.ids import RequestId
from tests.core.driver import BLOCK_SIZE, Driver, make_request


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


def test_ended_requests_are_forgotten_long_before_their_deadline() -> None:
    driver = Driver()
    driver.join()
    for number in range(1000):
        driver.submit(make_request(f"r{number}", 4, deadline_s=1e9))
        driver.scheduler.abort(RequestId(f"r{number}"))
    gc.collect()
    assert sum(isinstance(entry, Request) for entry in gc.get_objects()) < 600


# -- deadlines ------------------------------------------------------------------------------------


def test_what_cannot_start_in_time_is_refused_at_once_and_changes_nothing() -> None:
    driver = Driver(SchedulerConfig(max_num_seqs=1))
    driver.join(prefill_tokens_per_s=100.0)
    for number in range(5):
        driver.submit(make_request(f"r{number}", 200))
    with pytest.raises(DeadlineExceeded, match=r"could start in \d+"):
        driver.submit(make_request("late", 10, deadline_s=5.0))
    with pytest.raises(DeadlineExceeded):
        driver.submit(make_request("late", 10, queue_timeout_s=5.0))
    assert len(list(driver.scheduler.live_requests())) == 5
    driver.submit(make_request("late", 10, deadline_s=60.0))


def test_a_prompt_longer_than_its_deadline_is_refused_on_an_idle_replica() -> None:
    driver = Driver()
    driver.join(prefill_tokens_per_s=100.0)
    with pytest.raises(DeadlineExceeded):
        driver.submit(make_request("a", 500, deadline_s=4.0))
    driver.submit(make_request("b", 500, deadline_s=6.0))


def test_priority_passes_the_queue_and_keeps_its_deadline() -> None:
    driver = Driver(SchedulerConfig(max_num_seqs=1))
    driver.join(prefill_tokens_per_s=100.0)
    for number in range(5):
        driver.submit(make_request(f"r{number}", 200))
    driver.submit(make_request("urgent", 10, deadline_s=5.0, priority=10))


def queue(driver: Driver, requests: Iterable[tuple[int, int, str]]) -> None:
    """Submit requests of so many prompt tokens, priority and tenant."""
    for number, (num_tokens, priority, tenant) in enumerate(requests):
        driver.submit(make_request(f"r{number}", num_tokens, priority=priority, tenant=tenant))


@pytest.mark.parametrize("policy", PolicyKind)
def test_only_what_goes_before_counts_however_long_the_rest_is(policy: PolicyKind) -> None:
    driver = Driver(SchedulerConfig(max_num_seqs=1, policy=policy))
    driver.join(prefill_tokens_per_s=100.0, num_blocks=400)
    short, long, mine, other = (100, 2, "mine"), (4000, 0, "mine"), "mine", "other"
    match policy:
        case PolicyKind.FCFS:  # 500 tokens before it
            queue(driver, [(100, 0, mine)] * 5)
        case PolicyKind.PRIORITY:
            queue(driver, [long, short] * 5)
        case PolicyKind.FAIR:
            queue(driver, [(4000, 9, other)] * 5 + [long, short] * 5)
    with pytest.raises(DeadlineExceeded, match=r"start in 5\.0 s"):
        driver.submit(make_request("late", 10, deadline_s=4.9, priority=1, tenant=mine))
    driver.submit(make_request("timely", 10, deadline_s=5.2, priority=1, tenant=mine))


@pytest.mark.parametrize("policy", PolicyKind)
def test_long_prompts_before_it_count_whole(policy: PolicyKind) -> None:
    driver = Driver(SchedulerConfig(max_num_seqs=1, policy=policy))
    driver.join(prefill_tokens_per_s=100.0, num_blocks=400)
    queue(driver, [(3000, 2, "mine")] * 2 + [(10, 0, "mine")] * 60 + [(5000, 0, "other")] * 2)
    # Under FAIR the other tenant may have no turn before: it runs what may take up its share.
    start_s = 166.0 if policy is PolicyKind.FCFS else 60.0
    with pytest.raises(DeadlineExceeded, match=rf"start in {start_s} s"):
        driver.submit(
            make_request("late", 10, queue_timeout_s=start_s - 1, priority=1, tenant="mine")
        )
    driver.submit(make_request("a", 10, queue_timeout_s=start_s + 1, priority=1, tenant="mine"))


def test_what_waits_is_dropped_when_its_prompt_would_take_too_long() -> None:
    driver = Driver(SchedulerConfig(max_num_seqs=1))
    driver.join(prefill_tokens_per_s=100.0)
    driver.submit(make_request("running", 4, 20))
    driver.step()
    driver.submit(make_request("waiting", 200, deadline_s=10.0))
    due_s = driver.scheduler.next_tick()
    assert due_s is not None and 7.0 < due_s < 8.5
    driver.now = due_s
    driver.take(driver.scheduler.tick(driver.now))
    assert driver.failed == {"waiting": FailureKind.DEADLINE}
    driver.run()


def test_a_prefix_that_is_cached_meanwhile_is_time_won() -> None:
    driver = Driver(SchedulerConfig(max_num_seqs=1))
    driver.join(prefill_tokens_per_s=100.0)
    prompt = [position % 48 for position in range(10 * BLOCK_SIZE)]
    driver.submit(make_request("running", prompt, 20))
    driver.submit(request := make_request("waiting", [*prompt, 1], deadline_s=10.0))
    first_due_s = driver.scheduler.next_tick()
    assert first_due_s is not None
    driver.step()
    driver.now = first_due_s
    assert driver.scheduler.tick(driver.now) == []
    next_due_s = driver.scheduler.next_tick()
    assert next_due_s is not None and next_due_s > first_due_s + 1
    driver.run()
    driver.check_answer(request)
