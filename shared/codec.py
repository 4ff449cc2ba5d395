"""Maps step plans and results to the worker plane's protobuf messages and back.

Encoding trusts its caller; decoding checks everything that the types alone don't say, because
either side of the link may be broken, and raises ProtocolError. Whether handles, blocks and token
ids exist is for the receiver to check: only it knows its sequences, pools and vocabulary.

Long lists stay packed lists and tuples of ints, with no Python work per item, so that a decode
step of 256 sequences costs some microseconds. Floats travel in single precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from protos.quire.worker.v1 import worker_pb2
from shared.codec_checks import require, require_same_length
from shared.codec_logprobs import decode_logprobs, encode_logprobs
from shared.codec_sampling import MAX_LOGPROBS, decode_sampling, encode_sampling
from shared.errors import ProtocolError
from shared.logprobs import NO_LOGPROBS
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
from shared.sampling import NO_RULES

PROTOCOL_VERSION = 2
MAX_CANDIDATES = 4096
_WIRE_KINDS = {
    CacheOpKind.SWAP_OUT: worker_pb2.CACHE_OP_KIND_SWAP_OUT,
    CacheOpKind.SWAP_IN: worker_pb2.CACHE_OP_KIND_SWAP_IN,
    CacheOpKind.COPY: worker_pb2.CACHE_OP_KIND_COPY,
}
_KINDS = {wire: kind for kind, wire in _WIRE_KINDS.items()}


def parse_worker_message(frame: bytes) -> worker_pb2.WorkerMessage:
    """A worker's frame; ProtocolError when it is malformed or says nothing known."""
    message = worker_pb2.WorkerMessage()
    try:
        message.ParseFromString(frame)
    except DecodeError as error:
        raise ProtocolError("a worker sent a malformed frame") from error
    require(message.WhichOneof("body") is not None, "a worker sent a frame without a known body")
    return message


def parse_scheduler_message(frame: bytes) -> worker_pb2.SchedulerMessage:
    """The scheduler's frame; ProtocolError when it is malformed or says nothing known."""
    message = worker_pb2.SchedulerMessage()
    try:
        message.ParseFromString(frame)
    except DecodeError as error:
        raise ProtocolError("the scheduler sent a malformed frame") from error
    require(
        message.WhichOneof("body") is not None, "the scheduler sent a frame without a known body"
    )
    return message


def encode_plan(plan: StepPlan) -> worker_pb2.StepPlan:
    """The message of a plan. What a steady decode step lacks costs it next to nothing."""
    message = worker_pb2.StepPlan(
        step=plan.step, base_step=plan.base_step, decode_handles=plan.decode_handles
    )
    if plan.reset:
        message.reset = True
    if plan.append_handles:
        message.append_handles.extend(plan.append_handles)
        message.append_blocks.extend(plan.append_blocks)
    if plan.finished_handles:
        message.finished_handles.extend(plan.finished_handles)
    if plan.chunk_handles:
        message.chunk_handles.extend(plan.chunk_handles)
        message.chunk_num_tokens.extend(plan.chunk_num_tokens)
        message.chunk_samples.extend(plan.chunk_samples)
    if plan.starts:
        message.starts.extend(map(_encode_start, plan.starts))
    if plan.cache_ops:
        message.cache_ops.extend(map(_encode_cache_op, plan.cache_ops))
    if plan.forks or plan.chosen_handles:
        message.chosen_handles.extend(plan.chosen_handles)
        message.chosen_token_ids.extend(plan.chosen_token_ids)
        for fork in plan.forks:
            message.forks.add(handle=fork.handle, source_handle=fork.source, block=fork.block)
    for handle, mask in zip(plan.masked_handles, plan.masks, strict=True):
        message.token_masks.add(handle=handle, token_ids=mask.token_ids, bits=mask.bits)
    return message


def decode_plan(message: worker_pb2.StepPlan) -> StepPlan:
    """The plan of a message; ProtocolError when it is inconsistent."""
    require(message.base_step < message.step, "a plan does not come after its base step")
    require_same_length("appended blocks", message.append_handles, message.append_blocks)
    require_same_length("chunk sizes", message.chunk_handles, message.chunk_num_tokens)
    require_same_length("chunk samples", message.chunk_handles, message.chunk_samples)
    require(0 not in message.chunk_num_tokens, "a chunk computes no token")
    require_same_length("chosen tokens", message.chosen_handles, message.chosen_token_ids)
    masked_handles = tuple([mask.handle for mask in message.token_masks])
    require(len(set(masked_handles)) == len(masked_handles), "a sequence has two masks")
    return StepPlan(
        step=message.step,
        base_step=message.base_step,
        reset=message.reset,
        finished_handles=tuple(message.finished_handles),
        starts=tuple(map(_decode_start, message.starts)),
        forks=_decode_forks(message.forks) if message.forks else (),
        chosen_handles=tuple(message.chosen_handles),
        chosen_token_ids=tuple(message.chosen_token_ids),
        append_handles=tuple(message.append_handles),
        append_blocks=tuple(message.append_blocks),
        cache_ops=tuple(map(_decode_cache_op, message.cache_ops)),
        decode_handles=tuple(message.decode_handles),
        chunk_handles=tuple(message.chunk_handles),
        chunk_num_tokens=tuple(message.chunk_num_tokens),
        chunk_samples=tuple(message.chunk_samples),
        masked_handles=masked_handles,
        masks=tuple(map(_decode_mask, message.token_masks)),
    )


def _decode_forks(messages: Sequence[worker_pb2.Fork]) -> tuple[Fork, ...]:
    forks = tuple(Fork(fork.handle, fork.source_handle, fork.block) for fork in messages)
    targets = {fork.handle for fork in forks}
    require(len(targets) == len(forks), "a handle is forked twice")
    require(not any(fork.source in targets for fork in forks), "a fork is copied by another")
    return forks


def _decode_mask(message: worker_pb2.TokenMask) -> TokenMask:
    has_ids, has_bits = bool(message.token_ids), bool(message.bits)
    require(has_ids != has_bits, "a mask has not one form")
    return TokenMask(tuple(message.token_ids), message.bits)


def encode_result(result: StepResult) -> worker_pb2.StepResult:
    """The message of a result."""
    message = worker_pb2.StepResult(
        step=result.step,
        handles=result.handles,
        token_ids=result.token_ids,
        execute_s=result.execute_s,
        logprobs=encode_logprobs(result.logprobs),
        prompt_logprobs=encode_logprobs(result.prompt_logprobs),
    )
    for failure in result.failures:
        message.failures.add(handle=failure.handle, message=failure.message)
    for found in result.candidates:
        message.candidates.add(
            handle=found.handle, token_ids=found.token_ids, log_probs=found.log_probs
        )
    return message


def decode_result(message: worker_pb2.StepResult) -> StepResult:
    """The result of a message; ProtocolError when it is inconsistent."""
    require(message.step > 0, "a result names no step")
    handles, token_ids = tuple(message.handles[:]), tuple(message.token_ids[:])
    require_same_length("sampled tokens", handles, token_ids)
    require(0 <= message.execute_s < float("inf"), "a step took no finite time")
    return StepResult(
        step=message.step,
        handles=handles,
        token_ids=token_ids,
        failures=tuple(map(_decode_failure, found)) if (found := message.failures) else (),
        execute_s=message.execute_s,
        candidates=tuple(map(_decode_candidates, given)) if (given := message.candidates) else (),
        logprobs=(
            decode_logprobs(message.logprobs) if message.HasField("logprobs") else NO_LOGPROBS
        ),
        prompt_logprobs=(
            decode_logprobs(message.prompt_logprobs)
            if message.HasField("prompt_logprobs")
            else NO_LOGPROBS
        ),
    )


def _decode_failure(message: worker_pb2.SequenceFailure) -> SequenceFailure:
    return SequenceFailure(message.handle, message.message)


def _decode_candidates(message: worker_pb2.Candidates) -> Candidates:
    require_same_length("candidates", message.token_ids, message.log_probs)
    require(0 < len(message.token_ids) <= MAX_CANDIDATES, "a beam has no or too many candidates")
    log_probs = tuple(message.log_probs)
    require(not any(map(math.isnan, log_probs)), "a log-probability is no number")
    require(log_probs[0] <= 0, "a log-probability is above 0")
    require(list(log_probs) == sorted(log_probs, reverse=True), "candidates are out of order")
    return Candidates(message.handle, tuple(message.token_ids), log_probs)


def _encode_start(start: SequenceStart) -> worker_pb2.SequenceStart:
    return worker_pb2.SequenceStart(
        handle=start.handle,
        token_ids=start.token_ids,
        num_prompt_tokens=start.num_prompt_tokens,
        num_computed_tokens=start.num_computed_tokens,
        block_table=start.block_table,
        sampling=encode_sampling(start.sampling),
        sequence_index=start.sequence_index,
        num_candidates=start.num_candidates,
        num_prompt_logprobs=start.num_prompt_logprobs,
        first_prompt_logprob=start.first_prompt_logprob,
    )


def _decode_start(message: worker_pb2.SequenceStart) -> SequenceStart:
    num_tokens = len(message.token_ids)
    require(
        0 < message.num_prompt_tokens <= num_tokens,
        f"a sequence of {num_tokens} tokens has {message.num_prompt_tokens} in its prompt",
    )
    require(
        message.num_computed_tokens < num_tokens,
        f"a sequence of {num_tokens} tokens has {message.num_computed_tokens} computed",
    )
    require(message.num_candidates <= MAX_CANDIDATES, "a beam is to give too many candidates")
    sampling = decode_sampling(message.sampling)
    is_drawn = sampling.rules == NO_RULES and sampling.num_logprobs is None
    require(is_drawn or not message.num_candidates, "a beam is to be drawn")
    num_prompt_logprobs = None
    if message.HasField("num_prompt_logprobs"):
        num_prompt_logprobs = message.num_prompt_logprobs
        require(num_prompt_logprobs <= MAX_LOGPROBS, "too many log-probabilities are asked for")
        require(message.first_prompt_logprob > 0, "a first token is to have a log-probability")
    return SequenceStart(
        handle=message.handle,
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        num_computed_tokens=message.num_computed_tokens,
        block_table=tuple(message.block_table),
        sampling=sampling,
        sequence_index=message.sequence_index,
        num_candidates=message.num_candidates,
        num_prompt_logprobs=num_prompt_logprobs,
        first_prompt_logprob=message.first_prompt_logprob,
    )


def _encode_cache_op(op: CacheOp) -> worker_pb2.CacheOp:
    return worker_pb2.CacheOp(
        id=op.id,
        kind=_WIRE_KINDS[op.kind],
        source_blocks=op.source_blocks,
        target_blocks=op.target_blocks,
    )


def _decode_cache_op(message: worker_pb2.CacheOp) -> CacheOp:
    kind = _KINDS.get(message.kind)
    if kind is None:
        raise ProtocolError(f"a cache operation is of the unknown kind {message.kind}")
    require_same_length("moved blocks", message.source_blocks, message.target_blocks)
    return CacheOp(message.id, kind, tuple(message.source_blocks), tuple(message.target_blocks))
