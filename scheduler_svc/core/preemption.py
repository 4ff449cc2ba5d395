"""Whom to preempt when a replica's blocks run out, and what becomes of the victim's cache."""

from __future__ import annotations

from scheduler_svc.core.config import PreemptionMode
from scheduler_svc.core.policy import OrderKey
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Sequence


def choose_victim(replica: Replica, after: OrderKey) -> Sequence | None:
    """The last running sequence in the policy's order; None unless it stands behind `after`."""
    last = max(replica.table, key=lambda seq: seq.key, default=None)
    return None if last is None or last.key <= after else last


def should_swap(replica: Replica, mode: PreemptionMode, num_tokens: int) -> bool:
    """Whether a victim's `num_tokens` computed tokens go to the host pool rather than be dropped.

    AUTO compares two copies of the blocks with computing the tokens again, by the replica's
    measured rates; without these it drops.
    """
    num_blocks = replica.kv.num_blocks_for(num_tokens)
    if mode is PreemptionMode.RECOMPUTE or not 0 < num_blocks <= replica.kv.host_pool.num_free:
        return False
    if mode is PreemptionMode.SWAP:
        return True
    capacity = replica.capacity
    if not (capacity.copy_bytes_per_s and capacity.prefill_tokens_per_s):
        return False
    swap_s = 2 * num_blocks * capacity.block_bytes / capacity.copy_bytes_per_s
    return swap_s < num_tokens / capacity.prefill_tokens_per_s
