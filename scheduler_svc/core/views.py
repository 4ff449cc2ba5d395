"""Read-only looks at the scheduler, for the operator's API and metrics; cheap to make."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Request, Sequence
from scheduler_svc.core.states import SequenceState
from shared.ids import ReplicaId, RequestId


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica's load and pools."""

    replica: ReplicaId
    is_draining: bool
    num_running: int
    num_swapped: int
    num_plans_in_flight: int
    last_step: int
    num_blocks: int
    num_free_blocks: int
    """Blocks that no sequence holds; those whose content is cached included."""
    num_cached_blocks: int
    """Blocks in the prefix index, be they held or free."""
    num_evictable_blocks: int
    """Blocks that are both: free, with content that can be found."""
    num_host_blocks: int
    num_free_host_blocks: int


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One sequence of a live request."""

    sequence_index: int
    state: SequenceState
    replica: ReplicaId | None
    num_output_tokens: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class RequestView:
    """One live request."""

    request_id: RequestId
    priority: int
    arrival_s: float
    is_started: bool
    num_prompt_tokens: int
    sequences: tuple[SequenceView, ...]


def view_replica(replica: Replica) -> ReplicaView:
    kv = replica.kv
    return ReplicaView(
        replica=replica.id,
        is_draining=replica.is_draining,
        num_running=replica.num_running,
        num_swapped=len(replica.swapped),
        num_plans_in_flight=len(replica.in_flight),
        last_step=replica.last_step,
        num_blocks=kv.pool.num_blocks,
        num_free_blocks=kv.pool.num_free,
        num_cached_blocks=len(kv.index),
        num_evictable_blocks=kv.num_evictable,
        num_host_blocks=kv.host_pool.num_blocks,
        num_free_host_blocks=kv.host_pool.num_free,
    )


def view_request(request: Request, replicas: dict[ReplicaId, Replica]) -> RequestView:
    return RequestView(
        request_id=request.id,
        priority=request.new.priority,
        arrival_s=request.arrival_s,
        is_started=request.is_started,
        num_prompt_tokens=request.num_prompt_tokens,
        sequences=tuple(_view_sequence(seq, replicas) for seq in request.sequences),
    )


def _view_sequence(seq: Sequence, replicas: dict[ReplicaId, Replica]) -> SequenceView:
    num_tokens = len(seq.token_ids)
    if seq.is_running and seq.replica is not None:
        num_tokens = int(replicas[seq.replica].table.num_tokens[seq.row])
        if seq.request.beams is not None:
            num_tokens += seq.request.beams.num_tokens
    return SequenceView(
        sequence_index=seq.index,
        state=seq.state,
        replica=seq.replica,
        num_output_tokens=num_tokens - seq.num_prompt_tokens,
        num_preemptions=seq.num_preemptions,
    )
