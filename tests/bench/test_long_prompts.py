"""Figures of streams beside long prompts, on made-up traces and on a made-up engine."""

from __future__ import annotations

import asyncio

import pytest

from bench import long_prompts
from bench.load import Trace
from bench.long_prompts import drive, figures, medians
from bench.peers.engine import EngineFailed
from bench.workload import Workload
from tests.bench.traces import trace

LONG = trace(2.0, 5.0, num_prompt_tokens=4000)


def test_only_gaps_beside_a_waiting_prompt_count() -> None:
    stream = trace(0.0, 1.0, 1.1, 2.5, 4.5, 6.0, 6.1)
    got = figures([stream], [LONG], wall_s=10.0)
    assert got.itl_max_ms == pytest.approx(2000.0)
    assert got.ttft_ms == pytest.approx(3000.0)
    assert got.total_tok_s == pytest.approx((3 + 6 + 4000 + 1) / 10)


def test_streams_that_ended_before_are_no_measurement() -> None:
    with pytest.raises(EngineFailed, match="no stream ran"):
        figures([trace(0.0, 1.0, 1.1)], [LONG], wall_s=10.0)


def test_a_failed_request_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_prompts, "FIRST_PROMPT_S", 0.0)

    async def send(prompt: str, max_tokens: int, due_s: float) -> Trace:
        return Trace(due_s, error="UNAVAILABLE: gone")

    with pytest.raises(EngineFailed, match="gone"):
        asyncio.run(drive(send, Workload(2, 3, 0, 4), Workload(1, 9, 0, 1)))


def test_medians_are_taken_figure_by_figure() -> None:
    stream = trace(0.0, 1.0, 2.5, 4.5, 6.0)
    runs = [figures([stream], [LONG], wall_s) for wall_s in (1.0, 2.0, 4.0)]
    assert medians(runs)["total_tok_s"] == runs[1].total_tok_s
