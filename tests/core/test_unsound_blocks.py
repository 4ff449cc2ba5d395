"""Blocks of a sequence that its worker could not compute: nobody finds them any more.

A worker looks at logits where it samples alone, so that a fault in a chunk before that is seen
when the chunk's blocks are in the index already.
"""

from __future__ import annotations

import pytest

from scheduler_svc.core.config import PreemptionMode, SchedulerConfig
from scheduler_svc.core.messages import FailureKind
from shared.ids import RequestId
from shared.sampling import BeamParams
from tests.core.driver import BLOCK_SIZE, R1, Driver, make_request

PREFIX = [(5 * position) % 49 for position in range(3 * BLOCK_SIZE)]
IN_CHUNKS = SchedulerConfig(max_num_batched_tokens=BLOCK_SIZE)


def failed_after(driver: Driver) -> set[str]:
    """Who failed, once all is done; all by what they computed."""
    driver.run()
    assert set(driver.failed.values()) <= {FailureKind.SEQUENCE_FAILED}
    return set(driver.failed)


def check_that_it_recovers(driver: Driver) -> None:
    """The prefix is not found, is computed again, and found from then on."""
    for name, num_cached in (("again", 0), ("once more", len(PREFIX))):
        driver.submit(request := make_request(name, [*PREFIX, 1, 2]))
        driver.run()
        assert name not in driver.failed
        assert driver.started[name].num_cached_tokens == num_cached
        driver.check_answer(request)


def test_what_a_failed_sequence_computed_is_not_found() -> None:
    driver = Driver(IN_CHUNKS)
    driver.join()
    driver.submit(make_request("bad", [*PREFIX, 1]))
    driver.step(poisoned=[0])
    assert driver.view().num_cached_blocks == 1
    assert failed_after(driver) == {"bad"}
    assert driver.view().num_cached_blocks == 0
    check_that_it_recovers(driver)


def test_what_a_failed_sequence_took_over_is_not_found() -> None:
    """Who computed it left before sampling, so that nobody has seen what it is."""
    driver = Driver(IN_CHUNKS)
    driver.join()
    driver.submit(make_request("left", [*PREFIX, 1]))
    driver.step(poisoned=[0])
    driver.step()
    driver.step()
    driver.scheduler.abort(RequestId("left"))
    driver.submit(make_request("bad", [*PREFIX, 3]))
    assert failed_after(driver) == {"bad"}
    assert driver.started["bad"].num_cached_tokens == len(PREFIX)
    check_that_it_recovers(driver)


def test_running_sequences_keep_the_blocks_that_they_share() -> None:
    driver = Driver()
    driver.join()
    driver.submit(first := make_request("first", [*PREFIX, 1], 30))
    driver.step()
    driver.submit(make_request("bad", [*PREFIX, 2]))
    driver.schedule()
    driver.apply(driver.work(failing=[1]))
    assert set(driver.failed) == {"bad"}
    driver.run()
    driver.check_answer(first)
    check_that_it_recovers(driver)


@pytest.mark.parametrize("beam", [None, BeamParams(width=3, num_return=3)])
def test_choices_and_beams_do_not_bring_the_blocks_back(beam: BeamParams | None) -> None:
    """What they generated is published as they leave, with the prompt before it."""
    driver = Driver()
    driver.join()
    driver.submit(make_request("bad", [*PREFIX, 1], 40, num_sequences=3, beam=beam))
    for _ in range(4):
        driver.step()
    plan = driver.schedule()
    assert plan is not None
    driver.apply(driver.work(failing=plan.decode_handles[-1:]))
    assert set(driver.failed) == {"bad"}
    check_that_it_recovers(driver)


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_a_failure_is_heard_of_blocks_given_back_meanwhile(mode: PreemptionMode) -> None:
    """One whose blocks were dropped computes them again, and not from what it left behind."""
    driver = Driver(SchedulerConfig(preemption_mode=mode))
    driver.join(num_blocks=6, num_host_blocks=10)
    requests = [make_request(f"r{n}", 30, 40) for n in range(2)]
    for request in requests:
        driver.submit(request)
    while not driver.scheduler.counters.preemptions:
        if len(driver.plans[R1]) == 2:
            driver.apply(driver.work())
        driver.schedule()
    assert 1 in driver.plans[R1][0].decode_handles
    shared = driver.view().num_cached_blocks
    driver.apply(driver.work(failing=[1]))
    assert driver.view().num_cached_blocks < shared
    is_swap = mode is PreemptionMode.SWAP
    assert failed_after(driver) == ({"r1"} if is_swap else set())
    for request in requests[: 1 if is_swap else 2]:
        driver.check_answer(request)


def test_a_failure_is_heard_of_a_sequence_that_ended_meanwhile() -> None:
    driver = Driver()
    driver.join()
    driver.submit(make_request("bad", [*PREFIX, 1], 30))
    driver.step()
    driver.schedule()
    assert driver.scheduler.finish_sequence(RequestId("bad"), 0) is not None
    assert driver.view().num_cached_blocks == 3
    driver.apply(driver.work(failing=[0]))
    assert driver.view().num_cached_blocks == 0
    check_that_it_recovers(driver)
