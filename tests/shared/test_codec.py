"""Plans and results survive the wire; what no sound peer sends is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.quire.worker.v1 import worker_pb2
from shared.codec import (
    MAX_CANDIDATES,
    decode_plan,
    decode_result,
    encode_plan,
    encode_result,
    parse_scheduler_message,
    parse_worker_message,
)
from shared.errors import ProtocolError
from shared.plan import (
    CacheOp,
    CacheOpKind,
    Candidates,
    Fork,
    SequenceFailure,
    SequenceStart,
    StepPlan,
    StepResult,
    TokenMask,
)
from shared.sampling import SamplingParams

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)


def u32s(size: int | None = None) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(u32, min_size=size or 0, max_size=20 if size is None else size).map(tuple)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    unit = st.floats(0, 1, width=32)
    return SamplingParams(
        temperature=draw(st.floats(0, 100, width=32)),
        top_k=draw(u32),
        top_p=draw(unit.filter(bool)),
        min_p=draw(unit),
        seed=draw(u64),
    )


@st.composite
def starts(draw: st.DrawFn) -> SequenceStart:
    token_ids = draw(st.lists(u32, min_size=1).map(tuple))
    return SequenceStart(
        handle=draw(u32),
        token_ids=token_ids,
        num_prompt_tokens=draw(st.integers(1, len(token_ids))),
        num_computed_tokens=draw(st.integers(0, len(token_ids) - 1)),
        block_table=draw(u32s()),
        sampling=draw(sampling_params()),
        sequence_index=draw(u32),
        num_candidates=draw(st.integers(0, MAX_CANDIDATES)),
    )


@st.composite
def fork_lists(draw: st.DrawFn) -> tuple[Fork, ...]:
    """Forks into different handles, none of which another is forked from."""
    targets = draw(st.lists(u32, max_size=5, unique=True))
    sources = u32.filter(lambda handle: handle not in targets)
    return tuple(Fork(target, draw(sources), draw(u32)) for target in targets)


@st.composite
def candidate_lists(draw: st.DrawFn) -> Candidates:
    log_probs = draw(st.lists(st.floats(max_value=0), min_size=1, max_size=20))
    ids = draw(u32s(len(log_probs)))
    return Candidates(draw(u32), ids, tuple(sorted(log_probs, reverse=True)))


@st.composite
def cache_ops(draw: st.DrawFn) -> CacheOp:
    source = draw(u32s())
    return CacheOp(draw(u64), draw(st.sampled_from(CacheOpKind)), source, draw(u32s(len(source))))


def token_masks() -> st.SearchStrategy[TokenMask]:
    ids = st.lists(u32, min_size=1, max_size=20).map(tuple)
    bits = st.binary(min_size=1, max_size=20)
    return st.one_of(
        ids.map(lambda ids: TokenMask(token_ids=ids)), bits.map(lambda b: TokenMask(bits=b))
    )


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    step = draw(st.integers(1, 2**64 - 1))
    appended, chunks, chosen = draw(u32s()), draw(u32s()), draw(u32s())
    masked = tuple(dict.fromkeys(draw(u32s())))
    return StepPlan(
        step=step,
        base_step=draw(st.integers(0, step - 1)),
        reset=draw(st.booleans()),
        finished_handles=draw(u32s()),
        starts=draw(st.lists(starts(), max_size=3).map(tuple)),
        forks=draw(fork_lists()),
        chosen_handles=chosen,
        chosen_token_ids=draw(u32s(len(chosen))),
        append_handles=appended,
        append_blocks=draw(u32s(len(appended))),
        cache_ops=draw(st.lists(cache_ops(), max_size=3).map(tuple)),
        decode_handles=draw(u32s()),
        chunk_handles=chunks,
        chunk_num_tokens=tuple(draw(st.integers(1, 2**32 - 1)) for _ in chunks),
        chunk_samples=tuple(draw(st.booleans()) for _ in chunks),
        masked_handles=masked,
        masks=tuple(draw(token_masks()) for _ in masked),
    )


@st.composite
def results(draw: st.DrawFn) -> StepResult:
    handles = draw(u32s())
    failures = st.builds(SequenceFailure, u32, st.text(max_size=20))
    return StepResult(
        step=draw(st.integers(1, 2**64 - 1)),
        handles=handles,
        token_ids=draw(u32s(len(handles))),
        failures=draw(st.lists(failures, max_size=3).map(tuple)),
        execute_s=draw(st.floats(0, 1e9)),
        candidates=draw(st.lists(candidate_lists(), max_size=3).map(tuple)),
    )


@settings(deadline=None, derandomize=True, max_examples=50)
@given(plans())
def test_a_plan_survives_the_wire(plan: StepPlan) -> None:
    frame = worker_pb2.SchedulerMessage(epoch=3, step_plan=encode_plan(plan)).SerializeToString()
    assert decode_plan(parse_scheduler_message(frame).step_plan) == plan


@settings(deadline=None, derandomize=True, max_examples=50)
@given(results())
def test_a_result_survives_the_wire(result: StepResult) -> None:
    message = worker_pb2.WorkerMessage(epoch=3, step_result=encode_result(result))
    assert decode_result(parse_worker_message(message.SerializeToString()).step_result) == result


def test_a_steady_decode_step_of_256_sequences_is_under_1_kib() -> None:
    plan = StepPlan(
        step=1_000_000,
        base_step=999_999,
        decode_handles=range(256),
        append_handles=range(0, 256, 16),
        append_blocks=range(100_000, 100_016),
    )
    message = worker_pb2.SchedulerMessage(epoch=2**32, step_plan=encode_plan(plan))
    assert len(message.SerializeToString()) < 1024


START = worker_pb2.SequenceStart(
    token_ids=[5, 6, 7],
    num_prompt_tokens=2,
    num_computed_tokens=2,
    sampling=worker_pb2.SamplingParams(temperature=1, top_p=1, typical_p=1),
)


def start_with(**changes: object) -> worker_pb2.StepPlan:
    """A plan with START, changed; `sampling` as its fields."""
    start = worker_pb2.SequenceStart()
    start.CopyFrom(START)
    for name, value in changes.items():
        if isinstance(value, dict):
            for inner, number in value.items():
                setattr(start.sampling, inner, number)
        else:
            setattr(start, name, value)
    return worker_pb2.StepPlan(step=1, starts=[start])


def test_the_start_that_the_next_test_breaks_is_sound() -> None:
    assert decode_plan(start_with()).starts[0].token_ids == (5, 6, 7)


NAN = float("nan")
MASK = worker_pb2.TokenMask
FORK = worker_pb2.Fork
CANDIDATES = worker_pb2.Candidates
BROKEN_PLANS = {
    "no step": worker_pb2.StepPlan(),
    "base after step": worker_pb2.StepPlan(step=3, base_step=3),
    "handle without block": worker_pb2.StepPlan(step=1, append_handles=[1, 2], append_blocks=[9]),
    "chunk without size": worker_pb2.StepPlan(step=1, chunk_handles=[1], chunk_samples=[True]),
    "chunk without samples": worker_pb2.StepPlan(step=1, chunk_handles=[1], chunk_num_tokens=[1]),
    "empty chunk": worker_pb2.StepPlan(
        step=1, chunk_handles=[1], chunk_num_tokens=[0], chunk_samples=[True]
    ),
    "cache op without kind": worker_pb2.StepPlan(step=1, cache_ops=[worker_pb2.CacheOp(id=1)]),
    "source without target": worker_pb2.StepPlan(
        step=1,
        cache_ops=[worker_pb2.CacheOp(kind=worker_pb2.CACHE_OP_KIND_COPY, source_blocks=[1])],
    ),
    "no prompt": start_with(num_prompt_tokens=0),
    "long prompt": start_with(num_prompt_tokens=4),
    "nothing to compute": start_with(num_computed_tokens=3),
    "hot": start_with(sampling={"temperature": 101}),
    "temperature NaN": start_with(sampling={"temperature": NAN}),
    "top_p zero": start_with(sampling={"top_p": 0}),
    "top_p NaN": start_with(sampling={"top_p": NAN}),
    "min_p negative": start_with(sampling={"min_p": -0.5}),
    "too many candidates": start_with(num_candidates=MAX_CANDIDATES + 1),
    "chosen without token": worker_pb2.StepPlan(step=1, chosen_handles=[1]),
    "forked twice": worker_pb2.StepPlan(step=1, forks=[FORK(handle=1, source_handle=2)] * 2),
    "fork of a fork": worker_pb2.StepPlan(
        step=1,
        forks=[FORK(handle=1, source_handle=2), FORK(handle=3, source_handle=1)],
    ),
    "mask of no form": worker_pb2.StepPlan(step=1, token_masks=[MASK(handle=1)]),
    "mask of both forms": worker_pb2.StepPlan(
        step=1, token_masks=[MASK(handle=1, token_ids=[1], bits=b"1")]
    ),
    "two masks of one": worker_pb2.StepPlan(step=1, token_masks=[MASK(bits=b"1"), MASK(bits=b"2")]),
    "typical_p zero": start_with(sampling={"typical_p": 0}),
    "typical_p NaN": start_with(sampling={"typical_p": NAN}),
}


@pytest.mark.parametrize("name", BROKEN_PLANS)
def test_an_inconsistent_plan_is_refused(name: str) -> None:
    with pytest.raises(ProtocolError):
        decode_plan(BROKEN_PLANS[name])


@pytest.mark.parametrize(
    "message",
    [
        worker_pb2.StepResult(),
        worker_pb2.StepResult(step=1, handles=[1]),
        worker_pb2.StepResult(step=1, handles=[1], token_ids=[2, 3]),
        worker_pb2.StepResult(step=1, execute_s=-1),
        worker_pb2.StepResult(step=1, execute_s=NAN),
        worker_pb2.StepResult(step=1, execute_s=float("inf")),
        worker_pb2.StepResult(step=1, candidates=[CANDIDATES(handle=1)]),
        worker_pb2.StepResult(step=1, candidates=[CANDIDATES(token_ids=[1, 2], log_probs=[-1])]),
        worker_pb2.StepResult(step=1, candidates=[CANDIDATES(token_ids=[1], log_probs=[NAN])]),
        worker_pb2.StepResult(step=1, candidates=[CANDIDATES(token_ids=[1], log_probs=[0.5])]),
        worker_pb2.StepResult(
            step=1, candidates=[CANDIDATES(token_ids=[1, 2], log_probs=[-2, -1])]
        ),
    ],
)
def test_an_inconsistent_result_is_refused(message: worker_pb2.StepResult) -> None:
    with pytest.raises(ProtocolError):
        decode_result(message)


@pytest.mark.parametrize("frame", [b"", b"\xff" * 9, b"\x08\x01", b"GET / HTTP/1.1\r\n\r\n"])
def test_frames_that_say_nothing_known_are_refused(frame: bytes) -> None:
    """FIELD-FAILURES: truncated and foreign frames."""
    with pytest.raises(ProtocolError):
        parse_worker_message(frame)
    with pytest.raises(ProtocolError):
        parse_scheduler_message(frame)


def test_a_frame_cut_anywhere_is_refused() -> None:
    result = StepResult(step=7, handles=(1, 2, 3), token_ids=(4, 5, 300), execute_s=0.5)
    frame = worker_pb2.WorkerMessage(epoch=1, step_result=encode_result(result)).SerializeToString()
    for size in range(len(frame)):
        with pytest.raises(ProtocolError):
            parse_worker_message(frame[:size])
