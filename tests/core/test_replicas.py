"""Several replicas: load spreads, prefixes attract, and no loss or drain breaks an answer."""

from __future__ import annotations

import pytest

from scheduler_svc.core.config import PreemptionMode, SchedulerConfig
from scheduler_svc.core.messages import FailureKind, NewRequest
from scheduler_svc.core.placement import MAX_DEFERRALS
from shared.errors import Unavailable
from shared.ids import ReplicaId, RequestId
from tests.core.driver import BLOCK_SIZE, R1, R2, Driver, make_request

R3 = ReplicaId(3)
PREFIX = [(5 * position) % 49 for position in range(10 * BLOCK_SIZE)]


def submit_all(driver: Driver, *requests: NewRequest) -> list[NewRequest]:
    for request in requests:
        driver.submit(request)
    return list(requests)


def placed(driver: Driver) -> dict[ReplicaId, int]:
    replicas = [start.replica for start in driver.started.values()]
    return {replica: replicas.count(replica) for replica in driver.workers}


# -- placement ------------------------------------------------------------------------------------


def test_a_burst_spreads_evenly_over_idle_replicas_in_one_round() -> None:
    driver = Driver()
    driver.join(R1)
    driver.join(R2)
    submit_all(driver, *(make_request(f"r{number}", 20) for number in range(8)))
    driver.schedule(R1)
    driver.schedule(R2)
    assert placed(driver) == {R1: 4, R2: 4}


def test_new_requests_go_to_the_less_loaded_replica() -> None:
    driver = Driver()
    driver.join(R1)
    submit_all(driver, *(make_request(f"r{number}", 20, 50) for number in range(4)))
    driver.step(R1)
    driver.join(R2)
    submit_all(driver, *(make_request(f"s{number}", 20, 50) for number in range(4)))
    driver.schedule(R1)
    driver.schedule(R2)
    assert placed(driver) == {R1: 4, R2: 4}


def test_a_long_cached_prefix_attracts() -> None:
    driver = Driver()
    driver.join(R1)
    driver.join(R2)
    driver.submit(make_request("a", PREFIX, 2))
    driver.step(R2)
    driver.step(R2)
    driver.submit(make_request("b", [*PREFIX, 1], 2))
    assert driver.schedule(R1) is None
    driver.schedule(R2)
    assert driver.started["b"].replica == R2
    assert driver.started["b"].num_cached_tokens == len(PREFIX)


def test_a_prefix_on_a_full_replica_is_computed_again_elsewhere() -> None:
    driver = Driver(SchedulerConfig(max_num_seqs=1))
    driver.join(R1)
    driver.join(R2)
    driver.submit(make_request("a", PREFIX, 50))
    driver.step(R2)
    driver.submit(make_request("b", [*PREFIX, 1], 2))
    driver.schedule(R1)
    assert driver.started["b"].replica == R1


def test_a_hot_prefix_spreads_when_its_replica_has_more_work_than_the_prefix_is_worth() -> None:
    driver = Driver(SchedulerConfig(max_num_batched_tokens=64))
    driver.join(R1, num_blocks=300)
    driver.join(R2, num_blocks=300)
    driver.submit(make_request("first", PREFIX, 2))
    for _ in range(5):
        driver.step(R2)
    for number in range(3):
        driver.submit(make_request(f"few{number}", [*PREFIX, number], 100))
        assert driver.schedule(R1) is None
        driver.step(R2)
    assert placed(driver) == {R1: 0, R2: 4}
    for number in range(20):
        driver.submit(make_request(f"many{number}", [*PREFIX, 20 + number], 100))
    for _ in range(12):
        for replica in (R1, R2):
            if driver.schedule(replica) is not None:
                driver.apply(driver.work(replica), replica)
    counts = placed(driver)
    assert counts[R1] >= 5 and counts[R2] >= 10
    # The second replica computed the prefix once, and serves it from its own cache since.
    cached = [start.num_cached_tokens for start in driver.started.values() if start.replica == R1]
    assert cached[0] < len(PREFIX) == cached[-1]
    driver.run()


def test_a_faster_replica_takes_more_of_a_burst() -> None:
    driver = Driver()
    driver.join(R1, prefill_tokens_per_s=4000.0)
    driver.join(R2, prefill_tokens_per_s=1000.0)
    submit_all(driver, *(make_request(f"r{number}", 100) for number in range(10)))
    driver.schedule(R2)
    driver.schedule(R1)
    assert placed(driver) == {R1: 6, R2: 2}


def test_a_replica_that_does_not_come_round_holds_nothing_up() -> None:
    driver = Driver()
    driver.join(R1)
    driver.join(R2)
    driver.submit(make_request("a", PREFIX, 2))
    driver.step(R2)
    driver.submit(make_request("b", [*PREFIX, 1], 2))
    for _ in range(MAX_DEFERRALS):
        assert driver.schedule(R1) is None
    driver.schedule(R1)
    assert driver.started["b"].replica == R1


def test_a_request_goes_to_the_replica_that_can_hold_it() -> None:
    driver = Driver()
    driver.join(R1, num_blocks=2)
    driver.join(R2, num_blocks=20)
    [large, small] = submit_all(driver, make_request("large", 100), make_request("small", 5))
    driver.schedule(R1)
    assert "large" not in driver.started
    driver.run()
    assert driver.started["large"].replica == R2
    driver.check_answer(large)
    driver.check_answer(small)


# -- loss -----------------------------------------------------------------------------------------


def test_streams_of_a_lost_replica_go_on_without_a_lost_or_doubled_token() -> None:
    driver = Driver()
    driver.join(R1)
    driver.join(R2)
    requests = submit_all(driver, *(make_request(f"r{number}", 20, 30) for number in range(8)))
    for _ in range(5):
        for replica in (R1, R2):
            driver.schedule(replica)
            driver.schedule(replica)
            driver.apply(driver.work(replica), replica)
    lost = [name for name, start in driver.started.items() if start.replica == R1]
    driver.lose(R1)
    assert sorted(driver.recovered) == sorted(lost)
    driver.run()
    for request in requests:
        driver.check_answer(request)
    assert driver.scheduler.counters.recoveries == 4


def test_swapped_sequences_of_a_lost_replica_recover_too() -> None:
    driver = Driver(SchedulerConfig(preemption_mode=PreemptionMode.SWAP, reserve_fraction=0.0))
    driver.join(R1, num_blocks=6, num_host_blocks=10)
    requests = submit_all(driver, *(make_request(f"r{number}", 30, 40) for number in range(2)))
    while not driver.scheduler.num_swapped:
        driver.step(R1)
    driver.join(R2)
    driver.lose(R1)
    assert driver.recovered == ["r0", "r1"]
    driver.run()
    for request in requests:
        driver.check_answer(request)


def test_the_last_replica_lost_fails_all_at_once_without_grace() -> None:
    """FIELD-FAILURES, part 3: the only worker dies: running, waiting and just-sent requests end."""
    driver = Driver(SchedulerConfig(max_num_seqs=1))
    driver.join()
    submit_all(driver, *(make_request(f"r{number}", 20) for number in range(3)))
    driver.schedule()
    driver.lose(R1)
    assert driver.failed == dict.fromkeys(("r0", "r1", "r2"), FailureKind.NO_REPLICA)
    assert not list(driver.scheduler.live_requests())
    with pytest.raises(Unavailable):
        driver.submit(make_request("late", 4))


def test_requests_wait_for_a_replica_as_long_as_the_grace() -> None:
    driver = Driver(SchedulerConfig(no_replica_grace_s=5.0))
    driver.join(R1)
    [request] = submit_all(driver, make_request("a", 20))
    driver.now = 2.0
    driver.step(R1)
    driver.lose(R1)
    assert driver.scheduler.next_tick() == 7.0
    driver.now = 6.9
    driver.take(driver.scheduler.tick(driver.now))
    driver.join(R2)
    assert driver.scheduler.next_tick() is None
    driver.run()
    driver.check_answer(request)


def test_the_grace_ends() -> None:
    driver = Driver(SchedulerConfig(no_replica_grace_s=5.0))
    driver.join()
    driver.submit(make_request("a", 20))
    driver.lose(R1)
    driver.now = 5.0
    driver.take(driver.scheduler.tick(driver.now))
    assert driver.failed == {"a": FailureKind.NO_REPLICA}
    assert driver.scheduler.next_tick() is None


def test_a_request_that_takes_replicas_down_fails_by_itself() -> None:
    driver = Driver(SchedulerConfig(max_replica_losses=3, max_num_seqs=1))
    driver.join(ReplicaId(99))
    [poison, innocent] = submit_all(driver, make_request("poison", 20), make_request("b", 20))
    for number in range(1, 4):
        replica = ReplicaId(number)
        driver.join(replica)
        driver.lose(ReplicaId(99) if number == 1 else ReplicaId(number - 1))
        driver.schedule(replica)
    assert not driver.failed
    driver.join(ReplicaId(50))
    driver.lose(ReplicaId(3))
    assert driver.failed == {"poison": FailureKind.REPLICA_LOST_TOO_OFTEN}
    assert poison.request_id not in {view.request_id for view in driver.scheduler.live_requests()}
    driver.run()
    driver.check_answer(innocent)


def test_what_no_replica_left_can_hold_fails() -> None:
    driver = Driver()
    driver.join(R1)
    driver.join(R2, num_blocks=2)
    driver.submit(make_request("large", 100))
    driver.schedule(R1)
    driver.lose(R1)
    assert driver.failed == {"large": FailureKind.TOO_LARGE}


# -- drain ----------------------------------------------------------------------------------------


def test_a_drained_replica_hands_over_and_is_empty_when_its_plans_are_back() -> None:
    driver = Driver()
    driver.join(R1)
    driver.join(R2)
    requests = submit_all(driver, *(make_request(f"r{number}", 20, 30) for number in range(4)))
    for replica in (R1, R2):
        driver.schedule(replica)
        driver.schedule(replica)
    driver.take(driver.scheduler.drain_replica(R1))
    assert not driver.scheduler.is_drained(R1)
    driver.apply(driver.work(R1), R1)
    driver.apply(driver.work(R1), R1)
    assert driver.scheduler.is_drained(R1)
    driver.lose(R1)
    driver.run()
    assert not driver.recovered
    for request in requests:
        driver.check_answer(request)


def test_the_last_replica_finishes_what_it_has_before_it_leaves() -> None:
    driver = Driver(SchedulerConfig(reserve_fraction=0.0))
    driver.join(num_blocks=6)
    requests = submit_all(driver, *(make_request(f"r{number}", 30, 40) for number in range(2)))
    driver.step()
    driver.take(driver.scheduler.drain_replica(R1))
    while driver.scheduler.counters.preemptions == 0:
        driver.step()
        assert not driver.scheduler.is_drained(R1)
    driver.run()
    for request in requests:
        driver.check_answer(request)
    assert driver.scheduler.is_drained(R1)


def test_what_waits_does_not_start_on_a_draining_replica() -> None:
    driver = Driver(SchedulerConfig(max_num_seqs=1, no_replica_grace_s=5.0))
    driver.join()
    [running, waiting] = submit_all(driver, make_request("a", 20), make_request("b", 20))
    driver.step()
    driver.take(driver.scheduler.drain_replica(R1))
    while not driver.scheduler.is_drained(R1):
        driver.step()
    driver.check_answer(running)
    assert "b" not in driver.started
    driver.join(R2)
    driver.run()
    driver.check_answer(waiting)


# -- reset ----------------------------------------------------------------------------------------


def test_a_reset_voids_plans_in_flight_and_gives_everything_whole() -> None:
    driver = Driver()
    driver.join()
    requests = submit_all(driver, *(make_request(f"r{number}", 40, 20) for number in range(3)))
    for _ in range(5):
        driver.step()
    driver.schedule()
    driver.schedule()
    driver.plans[R1].clear()  # the first frame is lost, the second doesn't fit
    driver.scheduler.reset_replica(R1, at_step=driver.workers[R1].step)
    driver.scheduler.check_invariants()
    plan = driver.schedule()
    assert plan is not None
    assert (plan.reset, plan.base_step, plan.step) == (True, 5, 8)
    assert not plan.finished_handles
    # What was published stays: only the tokens of the open block are computed again.
    assert [start.num_computed_tokens for start in plan.starts] == [32, 32, 32]
    following = driver.schedule()
    assert following is not None
    assert (following.reset, following.base_step) == (False, 8)
    driver.run()
    for request in requests:
        driver.check_answer(request)


def test_abort_while_steps_are_in_flight_frees_when_they_are_back() -> None:
    """FIELD-FAILURES, part 2: late results are ignored, blocks reused only after the step is
    back."""
    driver = Driver()
    driver.join(num_blocks=4)
    driver.submit(make_request("a", 60, 4))
    driver.schedule()
    driver.schedule()
    driver.scheduler.abort(RequestId("a"))
    assert driver.view().num_free_blocks == 0
    driver.submit(request := make_request("b", 60, 3))
    driver.apply(driver.work())
    assert driver.view().num_free_blocks == 0
    driver.apply(driver.work())
    assert driver.view().num_free_blocks == 4
    driver.run()
    driver.check_answer(request)
    assert ("a", 0) not in driver.tokens
