"""Planted defects about log-probabilities; see tests/sim/defects.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler_svc.core.kv_cache_manager import KVCacheManager, PrefixMatch
from scheduler_svc.core.replica import Replica, StepRecord
from scheduler_svc.core.request import Sequence
from scheduler_svc.core.states import SequenceState
from shared.logprobs import LogprobRows, Logprobs


def score_cached_prompts(patch: pytest.MonkeyPatch) -> None:
    """A prompt that is to be scored starts from the cache, and what is cached is not told."""
    real = KVCacheManager.find_prefix
    owes: Callable[[Sequence], bool] = Sequence.owes_scores.fget  # type: ignore[attr-defined]
    is_looking = False

    def find_prefix(self: KVCacheManager, seq: Sequence) -> PrefixMatch:
        nonlocal is_looking
        is_looking = True
        try:
            return real(self, seq)
        finally:
            is_looking = False

    patch.setattr(Sequence, "owes_scores", property(lambda seq: not is_looking and owes(seq)))
    patch.setattr(KVCacheManager, "find_prefix", find_prefix)


def score_again_after_a_return(patch: pytest.MonkeyPatch) -> None:
    """A sequence that comes back forgets what is told of its prompt."""
    real = Replica.leave

    def leave(
        self: Replica, seq: Sequence, state: SequenceState, last_record: StepRecord | None = None
    ) -> None:
        real(self, seq, state, last_record)
        seq.num_scored = 1

    patch.setattr(Replica, "leave", leave)


def tell_of_a_neighbour(patch: pytest.MonkeyPatch) -> None:
    """Log-probabilities go to the next sequence of the step that asked for as many."""
    real = LogprobRows.by_handle

    def by_handle(self: LogprobRows) -> dict[int, Logprobs]:
        found = real(self)
        shapes = {(len(one.log_probs), one.num_top) for one in found.values()}
        if len(shapes) > 1:
            return found
        handles = list(found)
        return dict(zip([*handles[1:], *handles[:1]], found.values(), strict=True))

    patch.setattr(LogprobRows, "by_handle", by_handle)


SCORE_DEFECTS = (
    score_cached_prompts,
    score_again_after_a_return,
    tell_of_a_neighbour,
)
