"""The likeliest next tokens of beams, with their log-probabilities: `worker_svc.logprobs`' rule."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shared.plan import Candidates
from worker_svc.logprobs import best_ids, log_normalizer


def top_candidates(
    logits: torch.Tensor, handles: Sequence[int], counts: Sequence[int]
) -> list[Candidates]:
    """The first `counts[i]` tokens of row i of `logits` [n, vocab_size] float32, or all, for the
    beam `handles[i]`; equal logits by the lower id. The largest logit of each row is finite."""
    return [
        _of_row(row, handle, min(count, len(row)))
        for row, handle, count in zip(logits, handles, counts, strict=True)
    ]


def _of_row(logits: torch.Tensor, handle: int, count: int) -> Candidates:
    row = logits[None]
    ids = best_ids(row, count)
    highest, log_total = log_normalizer(row)
    log_probs = row.gather(1, ids).double() - highest - log_total
    return Candidates(handle, ids[0].tolist(), log_probs[0].tolist())
