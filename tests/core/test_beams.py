"""Beam searches in the core: a step in two, shared blocks, and the same beams after every loss."""

from __future__ import annotations

import pytest

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import NewRequest
from shared.ids import RequestId
from shared.plan import CacheOpKind
from shared.sampling import BeamParams, EarlyStopping
from tests.core.driver import BLOCK_SIZE, R1, R2, Driver, make_request


def search(
    name: str = "search", prompt: int = 10, max_tokens: int = 12, width: int = 3
) -> NewRequest:
    """A search that gives all its beams, at their full length."""
    beam = BeamParams(width, early_stopping=EarlyStopping.NEVER, num_return=width)
    return make_request(name, prompt, max_tokens, beam=beam)


@pytest.mark.parametrize(
    "prompt", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE + 5]
)
@pytest.mark.parametrize("budget", [7, 512])
def test_beams_are_those_of_a_search_without_cache(prompt: int, budget: int) -> None:
    """FIELD-FAILURES, part 1: beams against a reference without cache."""
    driver = Driver(SchedulerConfig(max_num_batched_tokens=budget))
    driver.join()
    driver.submit(request := search(prompt=prompt, max_tokens=BLOCK_SIZE + 4))
    driver.run()
    driver.check_answer(request)
    assert any(plan.forks for plan in driver.history)


def test_a_search_has_one_plan_in_flight_and_streams_beside_it_two() -> None:
    driver = Driver()
    driver.join()
    driver.submit(request := search(max_tokens=12))
    streams = [make_request(f"r{number}", 5, 40) for number in range(4)]
    for stream in streams:
        driver.submit(stream)
    driver.step()
    of_search = [start.handle for start in driver.history[0].starts if start.num_candidates]
    assert len(of_search) == 1
    plans = []
    while "search" in {str(view.request_id) for view in driver.scheduler.live_requests()}:
        while len(driver.plans[R1]) < 2:
            plan = driver.schedule()
            assert plan is not None
            plans.append(plan)
        driver.apply(driver.work())
    # Each plan has a token of each stream, and every other one a step of the search.
    assert all(len(plan.decode_handles) == 4 + len(plan.chosen_handles) for plan in plans)
    num_beams = [len(plan.chosen_handles) for plan in plans]
    assert num_beams[:21:2] == [3] * 11 and not any(num_beams[1::2])
    driver.run()
    for one in (request, *streams):
        driver.check_answer(one)


def test_beams_share_full_blocks_and_copy_the_open_one() -> None:
    driver = Driver()
    driver.join()
    driver.submit(request := search(prompt=4 * BLOCK_SIZE + 3, max_tokens=6))
    driver.run()
    driver.check_answer(request)
    # Four blocks of the prompt are shared, and each beam has a fifth of its own.
    assert driver.peak_blocks == 4 + 3
    copies = [op for plan in driver.history for op in plan.cache_ops]
    assert copies and all(op.kind is CacheOpKind.COPY for op in copies)
    forks = sum(len(plan.forks) for plan in driver.history)
    assert sum(len(op.target_blocks) for op in copies) == forks


def test_a_search_that_gives_its_blocks_away_begins_again_and_ends_the_same() -> None:
    driver = Driver(SchedulerConfig(reserve_fraction=0.0))
    driver.join(num_blocks=8)
    driver.submit(first := make_request("first", 40, 60))
    driver.submit(request := search(prompt=20, max_tokens=20))
    driver.run()
    driver.check_answer(first)
    driver.check_answer(request)
    assert driver.ends["search", 0].num_preemptions > 0
    assert driver.ends["first", 0].num_preemptions == 0


@pytest.mark.parametrize("num_steps", range(1, 8))
def test_a_search_goes_on_elsewhere_from_wherever_it_was_lost(num_steps: int) -> None:
    driver = Driver()
    driver.join(R1)
    driver.submit(request := search(prompt=BLOCK_SIZE - 2, max_tokens=9))
    for _ in range(num_steps):
        driver.step(R1)
    driver.join(R2)
    driver.lose(R1)
    driver.run()
    driver.check_answer(request)
    assert driver.recovered == ["search"]


def test_a_search_waits_until_all_its_beams_have_a_seat() -> None:
    driver = Driver(SchedulerConfig(max_num_seqs=4))
    driver.join()
    streams = [make_request(f"r{number}", 5, 6 + 10 * number) for number in range(3)]
    for stream in streams:
        driver.submit(stream)
    driver.submit(request := search(width=3))
    driver.submit(late := make_request("late", 5, 3))
    driver.run()
    for one in (request, late, *streams):
        driver.check_answer(one)
    # Two streams must have ended; who came later does not take the seats meanwhile.
    assert list(driver.started)[-2:] == ["search", "late"]


@pytest.mark.parametrize("num_steps", range(6))
def test_an_abandoned_search_leaves_nothing(num_steps: int) -> None:
    driver = Driver()
    driver.join()
    driver.submit(search(max_tokens=50))
    for _ in range(num_steps):
        driver.step()
    driver.schedule()
    driver.scheduler.abort(RequestId("search"))
    driver.run()
    assert not driver.ends and not driver.tokens
