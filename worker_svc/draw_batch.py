"""The draws of many rows in few launches, for GPUs: `worker_svc.sampler`'s rule in torch.

Both filters by rank end in "the first r ranks", so no sort of the vocabulary is needed: the r-th
largest logit tells which tokens are in, and the ids settle ties at it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from worker_svc.sampling_rows import SamplingRows

FIRST_CANDIDATES = 1024
"""How many ranks the top_p search takes at first; most nuclei are smaller."""
CANDIDATES_GROWTH = 8
ROWS_PER_LAUNCH = 64
"""Bounds the float64 temporaries: 64 rows of 128k tokens are 64 MiB each."""


def draw_batch(
    logits: torch.Tensor,
    chosen: npt.NDArray[np.intp],
    rows: SamplingRows,
    numbers: npt.NDArray[np.float64],
) -> npt.NDArray[np.int64]:
    """Tokens of the `chosen` rows [m] of `logits` [n, vocab_size], by their parameters and uniform
    `numbers` [m]. The largest logit of each must be finite."""
    parts = []
    for start in range(0, len(chosen), ROWS_PER_LAUNCH):
        some = np.arange(start, min(start + ROWS_PER_LAUNCH, len(chosen)))
        scores = logits[torch.from_numpy(chosen[some]).to(logits.device)]
        parts.append(_draw(scores, rows.take(some), numbers[some]))
    return np.concatenate(parts)


def _draw(
    scores: torch.Tensor, rows: SamplingRows, numbers: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Tokens of the rows [m], by their `scores` [m, vocab_size]."""
    device = scores.device
    temperature = _column(rows.temperature, device)
    highest = scores.amax(dim=-1, keepdim=True).double()
    weights = scores.double().sub_(highest).div_(temperature).exp_()
    num_ranks = _num_ranks(scores, weights, highest, rows)
    weights = _keep_ranks(weights, scores, num_ranks)
    if (rows.min_p > 0).any():
        weights.masked_fill_(weights < _column(rows.min_p, device), 0.0)
    if (rows.typical_p < 1.0).any():
        keep_typical(weights, rows.typical_p)
    running = weights.cumsum(dim=-1)
    total = running[:, -1:]
    # Rounding may lift u * total to total, which no running sum passes.
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(_column(numbers, device) * total, below)
    token_ids: npt.NDArray[np.int64] = (
        torch.searchsorted(running, target, right=True)[:, 0].cpu().numpy()
    )
    return token_ids


def _num_ranks(
    scores: torch.Tensor,
    weights: torch.Tensor,
    highest: torch.Tensor,
    rows: SamplingRows,
) -> npt.NDArray[np.int64]:
    """How many of the first ranks top_k and top_p leave to each row [m]."""
    vocab_size = scores.shape[1]
    top_k = rows.top_k
    num_ranks = np.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    nucleus = np.flatnonzero(rows.top_p < 1.0)
    if len(nucleus):
        picked = torch.from_numpy(nucleus).to(scores.device)
        num_ranks[nucleus] = _nucleus_ranks(
            scores[picked],
            weights[picked],
            highest[picked],
            _column(rows.temperature[nucleus], scores.device),
            num_ranks[nucleus],
            rows.top_p[nucleus],
        )
    return num_ranks


def _nucleus_ranks(
    scores: torch.Tensor,
    weights: torch.Tensor,
    highest: torch.Tensor,
    temperature: torch.Tensor,
    num_ranks: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float32],
) -> npt.NDArray[np.int64]:
    """The fewest first ranks, of the first `num_ranks` [m], that reach `top_p` [m] of their sum.

    The search sorts a few candidates first and takes more only when they don't reach the sum. The
    result is the same for any number of candidates: the sums run over the same values in the same
    order.
    """
    limits = torch.from_numpy(num_ranks).to(scores.device)
    vocab_size = scores.shape[1]
    in_play = _keep_ranks(weights, scores, num_ranks)
    share = _column(top_p, scores.device) * in_play.cumsum(dim=-1)[:, -1:]
    num_candidates = min(FIRST_CANDIDATES, vocab_size)
    while True:
        best = scores.topk(num_candidates, dim=-1, sorted=True).values
        sums = best.double().sub_(highest).div_(temperature).exp_().cumsum(dim=-1)
        reached = sums >= share
        is_found = reached[:, -1] | (limits <= num_candidates)
        if num_candidates == vocab_size or bool(is_found.all()):
            break
        num_candidates = min(num_candidates * CANDIDATES_GROWTH, vocab_size)
    # Summed in another order, all ranks together may miss the share by rounding: then all stay.
    first = torch.where(reached[:, -1], reached.int().argmax(dim=-1) + 1, limits)
    result: npt.NDArray[np.int64] = torch.minimum(first, limits).cpu().numpy()
    return result


def _keep_ranks(
    weights: torch.Tensor, scores: torch.Tensor, num_ranks: npt.NDArray[np.int64]
) -> torch.Tensor:
    """`weights` [m, vocab_size] with zeros beyond the first `num_ranks` [m]; may be the same."""
    limited = np.flatnonzero(num_ranks < scores.shape[1])
    if not len(limited):
        return weights
    picked = torch.from_numpy(limited).to(scores.device)
    ranks = torch.from_numpy(num_ranks[limited]).to(scores.device)
    kept = torch.ones_like(scores, dtype=torch.bool)
    kept[picked] = _first_ranks(scores[picked], ranks)
    return weights.masked_fill(~kept, 0.0)


def keep_typical(weights: torch.Tensor, typical_p: npt.NDArray[np.float32]) -> None:
    """Zero `weights` [m, vocab_size], in rows where `typical_p` [m] is below 1, but for the fewest
    of surprise nearest to the entropy that reach its share, and those as near as the last."""
    limited = np.flatnonzero(typical_p < 1.0)
    picked = torch.from_numpy(limited).to(weights.device)
    kept = weights[picked]
    total = kept.sum(dim=-1, keepdim=True)
    surprise = total.log() - kept.log()
    terms = torch.where(kept > 0, kept * surprise, 0.0)
    distance = (surprise - terms.sum(dim=-1, keepdim=True) / total).abs()  # inf where excluded
    ordered, order = distance.sort(dim=-1, stable=True)
    sums = kept.gather(1, order).cumsum(dim=-1)
    share = _column(typical_p[limited], weights.device) * total
    # Summed in another order, all together may miss the share by rounding: then all stay.
    last = torch.searchsorted(sums, share).clamp_(max=kept.shape[1] - 1)
    weights[picked] = kept.masked_fill_(distance > ordered.gather(1, last), 0.0)


def _first_ranks(scores: torch.Tensor, num_ranks: torch.Tensor) -> torch.Tensor:
    """Which tokens are among the first `num_ranks` [m] of their row; bool [m, vocab_size]."""
    best = scores.topk(int(num_ranks.max()), dim=-1, sorted=True).values
    last = best.gather(1, num_ranks[:, None] - 1)  # the logit of the last rank that stays
    above = scores > last
    equal = scores == last
    num_equal = num_ranks[:, None] - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1) <= num_equal))


def _column(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Values [m] as a float64 column [m, 1]."""
    return torch.from_numpy(values.astype(np.float64))[:, None].to(device)
