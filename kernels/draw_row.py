"""The rule by which a row draws, and its draw on the CPU, with few passes over the vocabulary.

For a row with temperature T, in this order:

    w[t] = exp((logit[t] - max logit) / T)              float64
    rank      by logit, highest first, equal logits by the lower token id
    top_k     keeps the first k ranks
    top_p     keeps, of those, the fewest first ranks whose weights reach top_p of their sum
    min_p     keeps, of those, the tokens with w >= min_p (the best token has w = 1)
    typical_p keeps, of those, by the entropy H of their distribution p, the tokens in the order of
              |-log p[t] - H|, least first, until their weights reach typical_p of the sum; equals
              of the last stay (Meister et al., Locally Typical Sampling, TACL 2023, section 4)
    draw      the first token, in the order of ids, at which the running sum of the kept weights
              passes u * (their sum)

A row with temperature 0 takes its first rank.

A filter by rank needs the order of its candidates alone. top_k takes those at or above the k-th
largest logit. For top_p, of n weights with sum S, those below (1 - top_p) * S / n are together
less than (1 - top_p) * S, so the rest reach top_p * S: only they can be in the nucleus.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from kernels.logits import Draws

Ids = npt.NDArray[np.intp]
Weights = npt.NDArray[np.float64]


def draw_row(logits: torch.Tensor, draws: Draws, index: int) -> int:
    """The token of one row, by its `logits` [vocab_size] float32 on the CPU and the values at
    `index` of `draws`, of which the temperature is not 0. The largest logit must be finite."""
    scores = logits.numpy()
    # Torch's exp and cumsum, for they are several times faster than numpy's.
    scaled = (logits.double() - float(scores.max())) / float(draws.temperature[index])
    weights: Weights = scaled.exp_().numpy()
    top_k, top_p = int(draws.top_k[index]), float(draws.top_p[index])
    min_p, typical_p = float(draws.min_p[index]), float(draws.typical_p[index])
    ids: Ids | None = None  # None: every token
    if 0 < top_k < len(scores):
        ids = _first_ranks(scores, top_k)
    if top_p < 1.0:
        ids = _nucleus(scores, weights, ids, top_p)
    if min_p > 0.0:
        ids = np.flatnonzero(weights >= min_p) if ids is None else ids[weights[ids] >= min_p]
    if typical_p < 1.0:
        ids = typical_ids(weights, np.arange(len(weights)) if ids is None else ids, typical_p)
    number = float(draws.numbers[index])
    if ids is None:
        return _draw(weights, number)
    return int(ids[_draw(weights[ids], number)])


def _first_ranks(scores: npt.NDArray[np.float32], num_ranks: int) -> Ids:
    """The ids of the first ranks, ascending."""
    last = len(scores) - num_ranks
    candidates = np.flatnonzero(scores >= np.partition(scores, last)[last])
    return np.sort(_by_rank(scores, candidates)[:num_ranks])


def _nucleus(
    scores: npt.NDArray[np.float32], weights: Weights, ids: Ids | None, top_p: float
) -> Ids:
    """Of `ids`, those of the fewest first ranks that reach `top_p` of their sum, ascending."""
    in_play = weights if ids is None else weights[ids]
    total = float(in_play.sum())
    # Half the bound, to be on the safe side of rounding.
    candidates = np.flatnonzero(in_play >= 0.5 * (1.0 - top_p) * total / len(in_play))
    ranked = _by_rank(scores, candidates if ids is None else ids[candidates])
    count = int(np.searchsorted(np.cumsum(weights[ranked]), top_p * total)) + 1
    return np.sort(ranked[:count])


def typical_ids(weights: Weights, ids: Ids, typical_p: float) -> Ids:
    """Of `ids`, the fewest of surprise nearest to the entropy that reach `typical_p` of their sum;
    those as near as the last of these stay with it."""
    ids = ids[weights[ids] > 0]
    total = float(weights[ids].sum())
    surprise = math.log(total) - np.log(weights[ids])
    entropy = float((weights[ids] * surprise).sum()) / total
    distance = np.abs(surprise - entropy)
    order = np.argsort(distance, kind="stable")
    sums = np.cumsum(weights[ids[order]])
    last = min(int(np.searchsorted(sums, typical_p * total)), len(ids) - 1)
    return ids[distance <= distance[order[last]]]


def _by_rank(scores: npt.NDArray[np.float32], ids: Ids) -> Ids:
    """Ascending `ids` by logit, highest first; equal ones stay in the order of ids."""
    return ids[np.argsort(-scores[ids], kind="stable")]


def _draw(weights: Weights, number: float) -> int:
    """The first index at which the running sum passes `number` of the whole."""
    running = torch.from_numpy(weights).cumsum(0).numpy()
    total = running[-1]
    # Rounding may lift number * total to total, which no running sum passes.
    target = min(number * total, np.nextafter(total, 0.0))
    return int(np.searchsorted(running, target, side="right"))
