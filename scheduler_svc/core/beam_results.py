"""Takes what a step gave for beams: searches go on in a later plan, or end with their answers."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler_svc.core.beam_group import BeamGroup
from scheduler_svc.core.messages import Event, SequenceFinished, TokensAppended
from scheduler_svc.core.replica import Replica, StepRecord
from scheduler_svc.core.request import Request
from scheduler_svc.core.results import reason_of
from scheduler_svc.core.states import SequenceState
from scheduler_svc.core.waiting_queue import WaitingQueue
from shared.plan import StepResult


def apply_candidates(
    replica: Replica, record: StepRecord, result: StepResult, waiting: WaitingQueue
) -> Iterator[tuple[Request, list[Event]]]:
    """Give each beam that still runs its candidates, and choose the next beams where all are
    there. Yields each search that has ended, still running, with its answers."""
    for found in result.candidates:
        row = found.handle
        if row in record.left:
            continue
        seq = replica.table.sequence(row)
        group = seq.request.beams
        assert group is not None
        if not group.take(seq.index, found):
            continue
        left = group.choose()
        if not group.chosen:
            yield seq.request, _answers(seq.request, group)
            continue
        for index in left:
            replica.leave(seq.request.sequences[index], SequenceState.WAITING)
            waiting.add(seq.request.sequences[index])


def _answers(request: Request, group: BeamGroup) -> list[Event]:
    """What the client gets, best first."""
    events: list[Event] = []
    for index, found in enumerate(group.hypotheses[: request.new.num_sequences]):
        if found.token_ids:
            events.append(TokensAppended(request.id, index, found.token_ids))
        events.append(
            SequenceFinished(
                request.id,
                index,
                reason_of(request.new, found.end_token_id, found.num_tokens),
                found.end_token_id,
                found.num_tokens,
                request.sequences[0].num_preemptions,
                found.score,
            )
        )
    return events
