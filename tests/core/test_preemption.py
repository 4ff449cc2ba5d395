"""When blocks run out: who gives way, what is kept, and that everybody gets to the end."""

from __future__ import annotations

import pytest

from scheduler_svc.core.config import PreemptionMode, SchedulerConfig
from scheduler_svc.core.messages import ReplicaCapacity
from scheduler_svc.core.preemption import should_swap
from scheduler_svc.core.prefix_index import BlockHasher
from scheduler_svc.core.replica import Replica
from shared.ids import ReplicaId
from shared.plan import CacheOpKind
from tests.core.driver import BLOCK_SIZE, R1, Driver, make_request

PREFIX = [(5 * position) % 49 for position in range(3 * BLOCK_SIZE)]
RECOMPUTE = SchedulerConfig(preemption_mode=PreemptionMode.RECOMPUTE, reserve_fraction=0.0)
SWAP = SchedulerConfig(preemption_mode=PreemptionMode.SWAP, reserve_fraction=0.0)


def preemptions_of(driver: Driver) -> dict[str, int]:
    return {name: end.num_preemptions for (name, _), end in driver.ends.items()}


@pytest.mark.parametrize("config", [RECOMPUTE, SWAP])
@pytest.mark.parametrize("num_host_blocks", [0, 2, 40])
def test_everyone_gets_the_right_answer_under_pressure(
    config: SchedulerConfig, num_host_blocks: int
) -> None:
    """FIELD-FAILURES, part 1: a preempted request meets the prefix cache on its way back."""
    driver = Driver(config)
    driver.join(num_blocks=14, num_host_blocks=num_host_blocks)
    requests = [make_request(f"r{number}", [*PREFIX, number], 60) for number in range(12)]
    for request in requests:
        driver.submit(request)
    driver.run()
    for request in requests:
        driver.check_answer(request)
    assert driver.scheduler.counters.preemptions >= 5
    assert driver.started.keys() == {str(request.request_id) for request in requests}


def test_the_oldest_is_never_preempted() -> None:
    driver = Driver(RECOMPUTE)
    driver.join(num_blocks=12)
    for number in range(6):
        driver.submit(make_request(f"r{number}", 20, 100))
    driver.run()
    preemptions = preemptions_of(driver)
    assert preemptions["r0"] == 0
    assert sum(preemptions.values()) > 0


def test_the_victim_has_the_lowest_priority_and_then_came_last() -> None:
    driver = Driver(RECOMPUTE)
    driver.join(num_blocks=8)
    for name, priority in (("low", -1), ("old", 0), ("young", 0)):
        driver.submit(make_request(name, 30, 40, priority=priority))
    driver.run()
    preemptions = preemptions_of(driver)
    assert preemptions["low"] >= preemptions["young"]
    assert preemptions["low"] > preemptions["old"] == 0


def test_the_last_in_order_waits_for_a_block_rather_than_lose_its_cache() -> None:
    driver = Driver(RECOMPUTE)
    driver.join(num_blocks=4)
    driver.submit(make_request("old", 17, 8))  # two blocks to its end
    driver.submit(make_request("young", 25, 20))  # wants a third one
    driver.run()
    assert preemptions_of(driver) == {"old": 0, "young": 0}
    assert driver.started["young"].started_s == driver.started["old"].started_s


def test_a_sequence_is_never_planned_in_the_step_that_preempts_it() -> None:
    """FIELD-FAILURES, part 1: scheduled and preempted in the same step, it stays in the plan."""
    driver = Driver(RECOMPUTE)
    driver.join(num_blocks=6)
    for number in range(3):
        driver.submit(make_request(f"r{number}", 28, 40))
    while not driver.scheduler.counters.preemptions:
        driver.step()
    plan = driver.history[-1]
    named = {*plan.decode_handles, *plan.chunk_handles, *plan.append_handles}
    assert not named & set(plan.finished_handles)
    assert len(plan.finished_handles) == 1


def test_blocks_in_flight_are_waited_for_before_more_are_preempted() -> None:
    driver = Driver(RECOMPUTE)
    driver.join(num_blocks=9)
    for number in range(3):
        driver.submit(make_request(f"r{number}", 40, 40))  # three blocks each
    plans = 0
    while not driver.scheduler.counters.preemptions:
        driver.schedule()
        plans += 1
        if len(driver.plans[R1]) == 2:
            driver.apply(driver.work())
        assert plans < 100
    # The victim's last plan is in flight: its three blocks come back with the result.
    assert driver.scheduler.counters.preemptions == 1
    driver.run()
    assert driver.scheduler.counters.preemptions <= 3


def test_swap_keeps_what_was_computed() -> None:
    driver = Driver(SWAP)
    driver.join(num_blocks=6, num_host_blocks=10)
    requests = [make_request(f"r{number}", 30, 40) for number in range(2)]
    for request in requests:
        driver.submit(request)
    driver.run()
    for request in requests:
        driver.check_answer(request)
    kinds = [op.kind for plan in driver.history for op in plan.cache_ops]
    assert kinds == [CacheOpKind.SWAP_OUT, CacheOpKind.SWAP_IN]
    [back] = [start for plan in driver.history[1:] for start in plan.starts]
    assert back.num_computed_tokens == len(back.token_ids) - 1


def test_a_full_host_pool_falls_back_to_recompute() -> None:
    """FIELD-FAILURES, part 1: n >= 2 exhausts the host pool and stalls. Host pool 2, and 0."""
    for num_host_blocks in (0, 2):
        driver = Driver(
            SchedulerConfig(
                preemption_mode=PreemptionMode.SWAP, reserve_fraction=0.0, max_num_batched_tokens=16
            )
        )
        driver.join(num_blocks=10, num_host_blocks=num_host_blocks)
        requests = [make_request(f"r{n}", 20 + n, 40, num_sequences=3) for n in range(6)]
        for request in requests:
            driver.submit(request)
        driver.run()
        for request in requests:
            driver.check_answer(request)
        assert driver.scheduler.counters.preemptions > driver.scheduler.counters.swaps_out


def test_swapped_sequences_return_before_new_ones_start() -> None:
    driver = Driver(SWAP)
    driver.join(num_blocks=6, num_host_blocks=10)
    for number in range(2):
        driver.submit(make_request(f"r{number}", 30, 40))
    while not driver.scheduler.num_swapped:
        driver.step()
    driver.submit(make_request("new", 4, 4))
    driver.run()
    starts = [start for plan in driver.history for start in plan.starts]
    assert [start.num_prompt_tokens for start in starts] == [30, 30, 30, 4]


def test_a_failure_in_flight_reaches_a_sequence_swapped_meanwhile() -> None:
    """Its half-computed blocks are in the host pool: going on with them would be wrong text."""
    driver = Driver(SWAP)
    driver.join(num_blocks=6, num_host_blocks=10)
    for number in range(2):
        driver.submit(make_request(f"r{number}", 30, 40))
    while not driver.scheduler.num_swapped:
        if len(driver.plans[R1]) == 2:
            driver.apply(driver.work())
        driver.schedule()
    assert 1 in driver.plans[R1][0].decode_handles
    driver.apply(driver.work(failing=[1]))
    assert set(driver.failed) == {"r1"}
    driver.run()
    assert set(driver.ends) == {("r0", 0)}


@pytest.mark.parametrize(
    ("copy_bytes_per_s", "prefill_tokens_per_s", "expected"),
    [(1e6, 1e3, True), (1e6, 1e6, False), (0.0, 1e3, False), (1e6, 0.0, False)],
)
def test_auto_takes_the_cheaper_by_the_measured_rates(
    copy_bytes_per_s: float, prefill_tokens_per_s: float, expected: bool
) -> None:
    """64 tokens are 4 blocks of 1000 bytes: 8 ms to copy out and in at 1 MB/s."""
    capacity = ReplicaCapacity(8, 8, 16, 64, 8, 1000, copy_bytes_per_s, prefill_tokens_per_s)
    replica = Replica(ReplicaId(1), capacity, SchedulerConfig(), BlockHasher(b"k"))
    assert should_swap(replica, PreemptionMode.AUTO, num_tokens=64) is expected
    assert not should_swap(replica, PreemptionMode.RECOMPUTE, num_tokens=64)
    assert should_swap(replica, PreemptionMode.SWAP, num_tokens=64)
    assert not should_swap(replica, PreemptionMode.SWAP, num_tokens=0)
