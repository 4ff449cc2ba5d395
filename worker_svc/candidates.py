"""The likeliest next tokens of beams, with their log-probabilities.

log_prob[t] = logit[t] - max logit - log(sum of exp(logit - max logit)), in float64. On the CPU each
row is summed by itself in one order, so that a beam's scores can't depend on its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shared.plan import Candidates


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
    least = logits.topk(count).values[-1]
    ids = (logits >= least).nonzero()[:, 0]  # ascending; equals of the least may be too many
    order = logits[ids].sort(descending=True, stable=True).indices[:count]
    ids = ids[order]
    highest = logits[ids[0]].double()
    weights = (logits.double() - highest).exp_()
    # numpy adds in an order that no number of threads changes
    total = float(weights.numpy().sum()) if weights.device.type == "cpu" else float(weights.sum())
    log_probs = (logits[ids].double() - highest - math.log(total)).tolist()
    return Candidates(handle, ids.tolist(), log_probs)
