"""The cost model finds the factors of a made-up machine, keeps what it knows, and stays sane."""

from __future__ import annotations

import math
from random import Random

import pytest

from scheduler_svc.core.step_cost import StepCost, StepWork, attention_of

TOKEN_S, PAIR_S, ROW_S, CONTEXT_S, FIXED_S = 8e-4, 3e-7, 1.2e-3, 2e-7, 4e-3


def true_s(work: StepWork) -> float:
    return (
        FIXED_S
        + TOKEN_S * work.num_chunk_tokens
        + PAIR_S * work.chunk_attention
        + ROW_S * work.num_decodes
        + CONTEXT_S * work.decode_context
    )


def random_work(rng: Random) -> StepWork:
    num_new, depth = rng.randint(16, 300), rng.randint(0, 4000)
    num_decodes = rng.randint(0, 12)
    return StepWork(
        num_new, attention_of(depth, num_new), num_decodes, num_decodes * rng.randint(10, 900)
    )


def learnt(seed: int = 1, num_steps: int = 200, noise: float = 0.05) -> StepCost:
    cost, rng = StepCost(5000.0), Random(seed)
    for _ in range(num_steps):
        work = random_work(rng)
        cost.learn(work, true_s(work) * rng.uniform(1 - noise, 1 + noise))
    return cost


@pytest.mark.parametrize("seed", range(5))
def test_expectations_come_within_a_tenth_of_noisy_steps(seed: int) -> None:
    cost, rng = learnt(seed), Random(100 + seed)
    for _ in range(50):
        work = random_work(rng)
        assert cost.step_s(work) == pytest.approx(true_s(work), rel=0.1)


def test_the_cost_of_chunks_is_remembered_over_thousands_of_decode_steps() -> None:
    cost = learnt()
    before_s = cost.prefill_s(2000, 200)
    rng = Random(7)
    for step in range(5000):
        work = StepWork(num_decodes=8, decode_context=8 * (100 + step))
        cost.learn(work, true_s(work) * rng.uniform(0.9, 1.1))
    assert cost.prefill_s(2000, 200) == pytest.approx(before_s, rel=0.15)


def test_a_machine_that_became_slower_is_followed() -> None:
    cost, rng = learnt(), Random(8)
    for _ in range(200):
        work = random_work(rng)
        cost.learn(work, 2 * true_s(work))
    work = random_work(rng)
    assert cost.step_s(work) == pytest.approx(2 * true_s(work), rel=0.1)


def test_one_stall_changes_little() -> None:
    cost = learnt()
    work = StepWork(num_decodes=8, decode_context=4000)
    for _ in range(50):
        cost.learn(work, true_s(work))
    cost.learn(work, 100.0)
    assert cost.step_s(work) < 1.2 * true_s(work)


@pytest.mark.parametrize("step_s", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_time_is_ignored(step_s: float) -> None:
    cost = StepCost(1000.0)
    expected_s = cost.step_s(StepWork(100))
    cost.learn(StepWork(100), step_s)
    assert cost.step_s(StepWork(100)) == expected_s


def test_before_any_step_the_measured_rate_counts() -> None:
    assert StepCost(1000.0).prefill_s(0, 100) == pytest.approx(0.1, rel=0.05)
    assert StepCost(0.0).prefill_s(0, 100) > 0


@pytest.mark.parametrize("depth", [0, 100, 5000])
@pytest.mark.parametrize("budget_s", [0.01, 0.1, 3.0])
def test_a_chunk_is_the_largest_that_its_budget_pays(depth: int, budget_s: float) -> None:
    cost = learnt()
    num_new = cost.chunk_tokens(depth, budget_s)
    assert cost.prefill_s(depth, num_new) <= budget_s * 1.000001
    assert cost.prefill_s(depth, num_new + 1) > budget_s


def test_chunks_shrink_with_depth() -> None:
    cost = learnt()
    sizes = [cost.chunk_tokens(depth, 0.1) for depth in (0, 2000, 8000)]
    assert sizes[0] > sizes[1] > sizes[2] > 0
    assert cost.chunk_tokens(0, 0.0) == cost.chunk_tokens(0, -1.0) == 0
