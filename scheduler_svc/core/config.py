"""What an operator may set in the core; frozen, resolved once by the process around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from scheduler_svc.core.policy import PolicyKind


class PreemptionMode(Enum):
    """What becomes of a victim's keys and values."""

    RECOMPUTE = "recompute"
    """Dropped, and computed again later."""
    SWAP = "swap"
    """Copied to the host pool while that has room, otherwise dropped."""
    AUTO = "auto"
    """The cheaper of both by the replica's measured rates."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and trade-offs of the scheduler. Times are in seconds of the caller's clock."""

    max_num_batched_tokens: int = 2048
    """Tokens in one step; a replica's own limit holds too."""
    max_num_seqs: int = 256
    """Sequences that run on one replica; a replica's own limit holds too."""
    max_waiting: int = 1024
    """Sequences that may wait (a request of n choices counts n). When nothing waits, any request
    may; the same holds for `max_waiting_tokens`."""
    max_waiting_tokens: int = 1 << 20
    """Prompt tokens that may wait, over all sequences."""
    retry_after_s: float = 1.0
    """Advice in errors that may pass later."""
    no_replica_grace_s: float = 0.0
    """How long requests stay when no replica is left; 0 fails them at once."""
    max_replica_losses: int = 3
    """A request that ran on this many lost replicas fails."""
    priority_ageing_s: float = 30.0
    """One step of priority is worth this much waiting, so that no priority starves another."""
    enable_prefix_cache: bool = True
    """Whether sequences reuse computed blocks of others with the same prefix."""
    reserve_fraction: float = 0.01
    """Part of a pool that new sequences leave free for running ones to grow into."""
    target_itl_s: float | None = 0.1
    """Most time between two tokens of a stream that prompts beside it may bring about: chunks are
    sized so that a step with decodes stays below. None leaves chunks to the token budget alone."""
    run_ahead: bool = True
    """Whether a replica's next step is planned while the last one runs, so that it need not wait
    for its plan; what turns out to be over is then noticed a step late."""
    policy: PolicyKind = PolicyKind.PRIORITY
    """Who goes first."""
    vocab_size: int = 1 << 32
    """The model's: token ids lie below it."""
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    """Under PolicyKind.FAIR: shares of tenants; one that isn't named has 1."""
    max_story_events: int = 64
    """Events kept of what happened to one request; older ones make room."""
    max_finished_stories: int = 1000
    """Ended requests whose events are kept."""
    preemption_mode: PreemptionMode = PreemptionMode.AUTO

    def __post_init__(self) -> None:
        for name in (
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_waiting",
            "max_waiting_tokens",
            "max_replica_losses",
            "max_story_events",
            "vocab_size",
        ):
            assert getattr(self, name) >= 1, f"{name} must be at least 1"
        assert self.no_replica_grace_s >= 0
        assert self.priority_ageing_s >= 0
        assert self.max_finished_stories >= 0
        assert self.target_itl_s is None or self.target_itl_s > 0
        assert all(weight > 0 for weight in self.tenant_weights.values())
        assert 0 <= self.reserve_fraction < 1
