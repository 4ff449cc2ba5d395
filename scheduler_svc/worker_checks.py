"""What a worker says of itself, checked: it is untrusted input like any other."""

from __future__ import annotations

import math
from collections.abc import Sequence

from protos.quire.worker.v1 import worker_pb2
from scheduler_svc.core.messages import ReplicaCapacity
from shared.codec import PROTOCOL_VERSION, decode_result
from shared.errors import ProtocolError
from shared.plan import StepResult

MAX_WORKER_ID_BYTES = 64
MAX_BLOCKS = 1 << 31
MAX_BLOCK_SIZE = 4096


def refusal_of(register: worker_pb2.Register, model_fingerprint: str) -> str | None:
    """Why a worker can't be a member, as a sentence for its operator; None when it can."""
    if register.protocol_version != PROTOCOL_VERSION:
        return (
            f"the worker speaks protocol version {register.protocol_version}, the scheduler "
            f"{PROTOCOL_VERSION}: run the same release on both sides"
        )
    if not 0 < len(register.worker_id.encode()) <= MAX_WORKER_ID_BYTES:
        return f"a worker's name must have 1 to {MAX_WORKER_ID_BYTES} bytes"
    if register.model_fingerprint != model_fingerprint:
        return "the worker's model files differ from the scheduler's: use the same files"
    if register.world_size > 1 or register.rank != 0:
        return "replicas of several ranks are not supported: start the worker with one rank"
    return None


def capacity_of(ready: worker_pb2.Ready) -> ReplicaCapacity:
    """The capacity that a worker measured; ProtocolError when it can't be true."""
    require(0 < ready.num_device_blocks < MAX_BLOCKS, "its number of device blocks is wrong")
    require(ready.num_host_blocks < MAX_BLOCKS, "its number of host blocks is wrong")
    require(0 < ready.block_size <= MAX_BLOCK_SIZE, "its block size is wrong")
    require(ready.max_num_batched_tokens > 0, "it takes no tokens")
    require(ready.max_num_seqs > 0, "it takes no sequences")
    for rate in (ready.copy_bytes_per_s, ready.prefill_tokens_per_s):
        require(0 <= rate < math.inf, "a measured rate is no finite number")
    return ReplicaCapacity(
        num_device_blocks=ready.num_device_blocks,
        num_host_blocks=ready.num_host_blocks,
        block_size=ready.block_size,
        max_num_batched_tokens=ready.max_num_batched_tokens,
        max_num_seqs=ready.max_num_seqs,
        block_bytes=ready.block_bytes,
        copy_bytes_per_s=ready.copy_bytes_per_s,
        prefill_tokens_per_s=ready.prefill_tokens_per_s,
    )


def result_of(message: worker_pb2.StepResult, vocab_size: int) -> StepResult:
    """The result of a step; ProtocolError when it is inconsistent or beyond the vocabulary."""
    result = decode_result(message)
    _require_known(result.token_ids, vocab_size)
    for found in result.candidates:
        _require_known(found.token_ids, vocab_size)
    for told in (result.logprobs, result.prompt_logprobs):
        if told.handles:
            _require_known(told.top_token_ids, vocab_size)
            require(
                max(told.ranks, default=0) <= vocab_size, "it gave a rank beyond the vocabulary"
            )
    return result


def _require_known(token_ids: Sequence[int], vocab_size: int) -> None:
    require(max(token_ids, default=0) < vocab_size, "it gave a token id beyond the vocabulary")


def require(holds: bool, description: str) -> None:
    """Raises ProtocolError with `description` unless it holds."""
    if not holds:
        raise ProtocolError(description)
