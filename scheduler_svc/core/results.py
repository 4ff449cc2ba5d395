"""Takes a step's result: checks it against its plan, then gives tokens to their sequences."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core.constraint import ConstraintBroken
from scheduler_svc.core.logprobs import check_logprobs
from scheduler_svc.core.messages import FinishReason, NewRequest, SequenceRef
from scheduler_svc.core.replica import Replica, StepRecord
from scheduler_svc.core.request import Sequence
from scheduler_svc.core.sequence_table import Bools, Ints
from scheduler_svc.core.states import SequenceState
from shared.errors import ProtocolError
from shared.logprobs import Logprobs
from shared.plan import StepResult


@dataclass(slots=True)
class Ending:
    """A sequence that has its last token."""

    seq: Sequence
    reason: FinishReason
    stop_token_id: int | None
    num_output_tokens: int


@dataclass(slots=True)
class StepOutcome:
    """What a step gave to sequences that still run."""

    refs: SequenceOf[SequenceRef] = ()
    token_ids: SequenceOf[int] = ()
    """A token for each of `refs`, without end-of-sequence and stop tokens."""
    endings: list[Ending] = field(default_factory=list)
    broken: list[tuple[Sequence, str]] = field(default_factory=list)
    """Sequences whose constraint can't go on, with what went wrong."""
    logprobs: Mapping[int, Logprobs] | None = None
    """Of those `token_ids[i]` of which they are asked for."""


def check_result(replica: Replica, result: StepResult) -> tuple[StepRecord, Ints]:
    """The record of the plan that `result` answers, and its tokens. Raises ProtocolError, with
    nothing changed, unless it answers the oldest plan in flight, and that completely."""
    if not replica.in_flight or replica.in_flight[0].step != result.step:
        expected = [record.step for record in replica.in_flight]
        raise ProtocolError(f"a result of step {result.step} came; in flight are {expected}")
    record = replica.in_flight[0]
    if len(result.handles) != len(result.token_ids):
        raise ProtocolError("a result's handles and tokens differ in number")
    try:
        token_ids = np.fromiter(result.token_ids, np.uint32).astype(np.int64)
    except OverflowError as error:
        raise ProtocolError("a sampled token id is no 32-bit number") from error
    planned = record.sample_handles
    if result.failures:
        failed = [failure.handle for failure in result.failures]
        known = {*planned, *record.chunk_rows, *record.candidate_rows}
        if len(set(failed)) != len(failed) or not known.issuperset(failed):
            raise ProtocolError("a failure names a sequence that its step didn't compute")
        planned = [row for row in planned if row not in failed]
    if record.candidate_rows or result.candidates:
        _check_candidates(replica, record, result)
    if list(result.handles) != planned:
        raise ProtocolError(f"the handles of the result of step {result.step} don't fit its plan")
    check_logprobs(record, result)
    return record, token_ids


def _check_candidates(replica: Replica, record: StepRecord, result: StepResult) -> None:
    failed = {failure.handle for failure in result.failures}
    planned = [row for row in record.candidate_rows if row not in failed]
    if planned != [found.handle for found in result.candidates]:
        raise ProtocolError(
            f"the candidates of the result of step {result.step} don't fit its plan"
        )
    for row, found in zip(planned, result.candidates, strict=True):
        if len(found.token_ids) != len(found.log_probs):
            raise ProtocolError("a beam's candidates and log-probabilities differ in number")
        if row in record.left:
            continue  # it has left, and nobody waits for its candidates
        beams = replica.table.sequence(row).request.beams
        assert beams is not None
        if not len(set(found.token_ids)) == beams.num_candidates == len(found.token_ids):
            raise ProtocolError(f"a beam must give {beams.num_candidates} different candidates")


def take_failures(
    replica: Replica, record: StepRecord, result: StepResult
) -> list[tuple[Sequence, str]]:
    """The sequences that the step failed, with what went wrong: those that still hold the row
    that the plan meant, and those whose half-made cache went to the host pool meanwhile.

    Of these nothing is published any more. Of others that left the row meanwhile what they left
    there is forgotten; they have ended, or are computed again."""
    failed = []
    for failure in result.failures:
        row = failure.handle
        if row not in record.left:
            seq = replica.table.sequence(row)
        else:
            seq, blocks = record.left[row]
            replica.kv.forget(blocks)
            if seq.state is not SequenceState.SWAPPED or seq.replica != replica.id:
                continue
        seq.request.is_unsound = True
        failed.append((seq, failure.message))
    return failed


def apply_tokens(
    replica: Replica, record: StepRecord, result: StepResult, token_ids: Ints
) -> StepOutcome:
    """Publish what the step's chunks computed, and give each sequence that still runs its token.

    Failed sequences have left their rows before, so that nothing of theirs is published. Endings
    still run; what came for sequences that left meanwhile is dropped.
    """
    table = replica.table
    rows, index = record.sample_rows, record.sample_index
    if record.left:  # with those that failed now
        rows = np.array(result.handles, np.int64)
        is_own = ~np.isin(rows, list(record.left))
        index = rows = rows[is_own]
        token_ids = token_ids[is_own]
    if record.chunk_rows:
        _publish_chunks(replica, record)
    is_last = table.append_tokens(index, token_ids)
    is_stop = table.is_stop(index, token_ids)
    is_last |= is_stop
    outcome = _outcome(replica, rows, token_ids, is_stop, is_last)
    if result.logprobs.handles:
        found = result.logprobs.by_handle()
        kept = rows[~is_stop].tolist()
        outcome.logprobs = {at: found[row] for at, row in enumerate(kept) if row in found}
    return outcome


def _publish_chunks(replica: Replica, record: StepRecord) -> None:
    table = replica.table
    for row, end in zip(record.chunk_rows, record.chunk_ends, strict=True):
        if row not in record.left:
            replica.kv.publish(table.sequence(row), end)


def _outcome(
    replica: Replica, rows: Ints, token_ids: Ints, is_stop: Bools, is_last: Bools
) -> StepOutcome:
    table = replica.table
    if not is_last.nonzero()[0].size:
        return StepOutcome(table.refs(rows), token_ids.tolist())
    accepted = _Accepted()
    if replica.constrained:
        accepted = _accept(replica, rows, token_ids, is_stop, is_last)
    endings = [
        _ending(
            table.sequence(row),
            token if stop else None,
            int(table.num_tokens[row]),
            is_complete=row in accepted.complete,
        )
        for row, token, stop in zip(
            rows[is_last].tolist(), token_ids[is_last].tolist(), is_stop[is_last], strict=True
        )
    ]
    rows, token_ids = rows[~is_stop], token_ids[~is_stop]
    return StepOutcome(table.refs(rows), token_ids.tolist(), endings, accepted.broken)


@dataclass(slots=True)
class _Accepted:
    """What constraints say to a step's tokens."""

    complete: set[int] = field(default_factory=set)
    """Rows after whose token nothing can follow."""
    broken: list[tuple[Sequence, str]] = field(default_factory=list)


def _accept(
    replica: Replica, rows: Ints, token_ids: Ints, is_stop: Bools, is_last: Bools
) -> _Accepted:
    """Give each constraint its token. Those of `rows` that can go on are in `is_last` no more."""
    table, accepted = replica.table, _Accepted()
    for at in (is_last & ~is_stop).nonzero()[0].tolist():
        row = int(rows[at])
        seq = replica.constrained.get(row)
        if seq is None:
            continue
        assert seq.constraint is not None
        try:
            if not seq.constraint.accept(int(token_ids[at])):
                accepted.complete.add(row)
            elif table.num_tokens[row] < replica.limit_of(seq.request.new):
                table.limit[row] += 1
                is_last[at] = False
        except ConstraintBroken as error:
            accepted.broken.append((seq, str(error)))
            is_last[at] = False
    return accepted


def _ending(
    seq: Sequence, stop_token_id: int | None, num_tokens: int, *, is_complete: bool
) -> Ending:
    num_output_tokens = num_tokens - seq.num_prompt_tokens
    reason = FinishReason.CONSTRAINT_COMPLETE
    if not is_complete:
        reason = reason_of(seq.request.new, stop_token_id, num_output_tokens)
    return Ending(seq, reason, stop_token_id, num_output_tokens)


def reason_of(new: NewRequest, stop_token_id: int | None, num_output_tokens: int) -> FinishReason:
    """Why a sequence ended: by the token that stopped it, or as it has so many tokens."""
    if stop_token_id is not None:
        is_eos = stop_token_id in new.eos_token_ids
        return FinishReason.EOS if is_eos else FinishReason.STOP_TOKEN
    is_own_limit = num_output_tokens >= new.max_tokens
    return FinishReason.MAX_TOKENS if is_own_limit else FinishReason.CONTEXT_LIMIT
