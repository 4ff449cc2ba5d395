"""The load generator's arithmetic."""

from __future__ import annotations

import pytest

from bench.load import Trace
from bench.report import Report, Spread, percentile
from bench.workload import Workload
from protos.quire.admin.v1 import admin_pb2


def test_the_same_workload_gives_the_same_prompts_and_arrivals() -> None:
    workload = Workload(8, prompt_words=20, shared_words=12, max_tokens=4, seed=3)
    assert workload.prompts() == workload.prompts()
    assert workload.arrivals_s(5.0) == workload.arrivals_s(5.0)
    assert workload.prompts() != Workload(8, 20, 12, 4, seed=4).prompts()


def test_prompts_share_their_first_words_and_then_part() -> None:
    prompts = [text.split() for text in Workload(8, 20, 12, 4).prompts()]
    assert all(len(words) == 20 for words in prompts)
    assert len({tuple(words[:12]) for words in prompts}) == 1
    assert len({tuple(words[12:]) for words in prompts}) == 8


def test_mixed_lengths_are_from_an_eighth_up() -> None:
    jobs = Workload(200, 96, 32, 80, is_mixed=True).jobs()
    own_words = [len(job.prompt.split()) - 32 for job in jobs]
    max_tokens = [job.max_tokens for job in jobs]
    assert min(own_words) >= 8 and max(own_words) <= 64
    assert min(max_tokens) >= 10 and max(max_tokens) <= 80
    # half of each lies below the geometric mean of its bounds
    assert 80 < sum(words < 64 / 8**0.5 for words in own_words) < 120
    assert 80 < sum(tokens < 80 / 8**0.5 for tokens in max_tokens) < 120


def test_arrivals_come_at_the_asked_rate() -> None:
    arrivals = Workload(20_000, 1, 0, 1).arrivals_s(50.0)
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(20_000 / 50.0, rel=0.03)


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 50), percentile(values, 99), percentile(values, 100)) == (
        50,
        99,
        100,
    )
    assert percentile([7.0], 1) == 7.0
    assert Spread.of_seconds([]) is None


def test_an_open_loop_counts_the_wait_from_the_due_time() -> None:
    """A generator that falls behind must not hide the wait (coordinated omission)."""
    trace = Trace(due_s=10.0, message_s=[13.0], message_tokens=[1])
    assert trace.first_token_s == 3.0


def test_tokens_of_one_message_share_its_wait() -> None:
    trace = Trace(due_s=0.0, message_s=[1.0, 2.0, 5.0], message_tokens=[1, 1, 3])
    assert list(trace.inter_token_s()) == [1.0, 1.0, 1.0, 1.0]


def test_failed_requests_are_counted_and_give_no_figures() -> None:
    good = Trace(0.0, [1.0, 2.0], [1, 1], 2.0, num_prompt_tokens=5, num_output_tokens=2)
    bad = Trace(0.0, end_s=0.1, error="UNAVAILABLE: no worker")
    report = Report.of_traces([bad, good], wall_s=2.0)
    assert (report.num_requests, report.num_failed) == (2, 1)
    assert report.output_tok_s == 1.0 and report.first_error == "UNAVAILABLE: no worker"
    assert report.ttft_ms is not None and report.ttft_ms.p99 == 1000.0
    assert report.scheduler is None


def test_the_schedulers_share_is_weighed_by_steps() -> None:
    state = admin_pb2.GetEngineStateResponse(
        replicas=[
            admin_pb2.ReplicaState(num_steps=30, schedule_s=0.001, execute_s=0.009),
            admin_pb2.ReplicaState(num_steps=10, schedule_s=0.005, execute_s=0.005),
        ]
    )
    scheduler = Report.of_traces([], 1.0, state).scheduler
    assert scheduler is not None
    assert scheduler.schedule_ms == pytest.approx(2.0)
    assert scheduler.share == pytest.approx(0.2)
