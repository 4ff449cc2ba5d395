"""Log-probabilities on their way from a step's result to their sequences: held against what the
plan asks for, and passed on without a look at any."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from scheduler_svc.core.messages import PromptScored
from scheduler_svc.core.replica import Replica, StepRecord
from shared.errors import ProtocolError
from shared.logprobs import LogprobRows
from shared.plan import StepResult


def check_logprobs(record: StepRecord, result: StepResult) -> None:
    """Raises ProtocolError unless `result` tells just what its plan asks for."""
    asked = record.num_logprobs
    if asked or result.logprobs.handles:
        expected = [(row, 1, asked[row]) for row in result.handles if row in asked]
        _check(record.step, result.logprobs, expected)
    if record.prompt_places or result.prompt_logprobs.handles:
        failed = {failure.handle for failure in result.failures}
        expected = [
            (row, places.end - places.first, places.num_top)
            for row, places in record.prompt_places.items()
            if row not in failed
        ]
        _check(record.step, result.prompt_logprobs, expected)


def _check(step: int, rows: LogprobRows, expected: SequenceOf[tuple[int, int, int]]) -> None:
    if list(zip(rows.handles, rows.num_places, rows.num_tops, strict=True)) != expected:
        raise ProtocolError(f"the log-probabilities of step {step} don't fit its plan")


def score_prompts(replica: Replica, record: StepRecord, result: StepResult) -> list[PromptScored]:
    """What the step tells of prompts whose sequences still run where the plan meant them."""
    found, events = result.prompt_logprobs.by_handle(), []
    for row, places in record.prompt_places.items():
        if row in found and row not in record.left:
            seq = replica.table.sequence(row)
            assert seq.num_scored == places.first, "a place of the prompt is lost or told twice"
            seq.num_scored = places.end
            events.append(PromptScored(seq.request.id, places.first, found[row]))
    return events
