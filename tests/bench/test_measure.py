"""The figures are right on hand-made traces, and an engine that does less work has none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench.load import Trace
from bench.peers import measure as measuring
from bench.peers.engine import EngineFailed, Setup
from bench.peers.measure import figures, gaps_during, measure
from bench.peers.scenarios import SCENARIOS, Scenario
from bench.workload import Workload
from tests.bench.traces import engine, steady, trace

SMALL = Scenario("small", Workload(6, 4, 0, 20), num_clients=2)


def setup(scenario: Scenario = SMALL) -> Setup:
    return Setup(Path("model.gguf"), Path("peers"), 1, scenario, Path("log"))


def test_figures_of_plain_streams() -> None:
    got = figures([trace(0.0, 0.1, 0.2, 0.3), trace(1.0, 1.3, 1.4)], [], wall_s=2.0)
    assert got.tok_s == 5 / 2.0
    assert got.ttft_ms == pytest.approx(100) and got.ttft_p99_ms == pytest.approx(300)
    assert got.itl_p50_ms == pytest.approx(100) and got.itl_p99_ms == pytest.approx(100)
    assert got.num_prompt_tokens == 6


def test_a_stall_behind_a_long_prompt_shows_however_many_quick_tokens_there_are() -> None:
    quick = [0.01 * index for index in range(1, 500)]
    stalled = trace(0.0, *quick, 8.0, *(8.0 + at_s for at_s in quick))
    long = trace(5.0, 7.9, 8.0)
    assert list(gaps_during([stalled], [long])) == [pytest.approx(8.0 - quick[-1])]
    assert figures([stalled], [], 20.0).itl_p99_ms == pytest.approx(10)
    got = figures([stalled], [long], 20.0)
    assert got.itl_p99_ms == pytest.approx(3010) and got.ttft_ms == pytest.approx(2900)


def test_gaps_at_the_borders_of_a_long_wait_count_where_they_overlap() -> None:
    stream = trace(0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
    assert len(list(gaps_during([stream], [trace(2.5, 3.5)]))) == 2
    assert len(list(gaps_during([stream], [trace(2.0, 3.0)]))) == 1
    assert not list(gaps_during([stream], [trace(5.0, 9.0)]))


def test_long_prompts_among_no_stream_say_so() -> None:
    with pytest.raises(EngineFailed, match="no stream ran"):
        figures([trace(0.0, 1.0, 2.0)], [trace(3.0, 4.0)], 5.0)


def test_a_measurement_sends_what_the_scenario_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "LONG_AFTER_S", 0.0)
    scenario = replace(SMALL, long=Workload(2, 50, 0, 5))
    asked: list[int] = []

    def answer(max_tokens: int, due_s: float) -> Trace:
        asked.append(max_tokens)
        return steady(max_tokens, due_s)

    got = asyncio.run(measure(engine(answer), setup(scenario)))
    assert sorted(asked[-8:]) == [5, 5, *[20] * 6]
    assert got.ttft_ms == pytest.approx(10) and got.tok_s > 0


def short(max_tokens: int, due_s: float) -> Trace:
    return steady(max_tokens - 1, due_s)


def uncounted(max_tokens: int, due_s: float) -> Trace:
    return replace(steady(max_tokens, due_s), num_output_tokens=max_tokens - 1)


def failed(max_tokens: int, due_s: float) -> Trace:
    return replace(steady(max_tokens, due_s), error="queue full")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (short, "15 tokens in 15 counted ones instead of 16"),
        (uncounted, "15 tokens in 16 counted ones"),
        (failed, "queue full"),
    ],
)
def test_an_engine_that_does_less_work_has_no_figures(
    answer: Callable[[int, float], Trace], told: str
) -> None:
    with pytest.raises(EngineFailed, match=told):
        asyncio.run(measure(engine(answer), setup()))


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())
def test_nothing_measured_was_cached_by_the_warm_up(scenario: Scenario) -> None:
    """Not a prompt, and not its beginning: the shared words are another seed's too."""
    warm = scenario.warm_up()
    for measured, before in ((scenario.load, warm.load), (scenario.long, warm.long)):
        if measured is None or before is None:
            continue
        begins = {tuple(prompt.split()[:8]) for prompt in measured.prompts()}
        assert not begins & {tuple(prompt.split()[:8]) for prompt in before.prompts()}


def test_shared_words_are_at_the_start_of_all_prompts() -> None:
    prompts = SCENARIOS["shared_16"].load.prompts()
    assert len({tuple(prompt.split()[:512]) for prompt in prompts}) == 1
    assert len({tuple(prompt.split()[512:]) for prompt in prompts}) == len(prompts)
