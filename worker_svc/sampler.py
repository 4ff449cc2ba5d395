"""Draws the next token of each row from its logits: one rule, row by row.

The rule, for a row with temperature T (see `shared.sampling` for the order of the filters):

    w[t] = exp((logit[t] - max logit) / T)              float64
    rank   by logit, highest first, equal logits by the lower token id
    top_k  keeps the first k ranks
    top_p  keeps, of those, the fewest first ranks whose weights reach top_p of their sum
    min_p  keeps, of those, the tokens with w >= min_p (the best token has w = 1)
    draw   the first token, in the order of ids, at which the running sum of the kept weights
           passes u * (their sum), u from `worker_svc.philox`

Both rank filters end in "the first r ranks", so no sort of the vocabulary is needed: the r-th
largest logit tells which tokens are in, and the ids settle ties at it.

On the CPU each row is computed by itself, so that its token can't depend on its neighbours; on a
GPU many rows go in one launch, where the order of a row's float64 sums is the device's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shared.sampling import GREEDY_BELOW_TEMPERATURE
from worker_svc.philox import uniforms

FIRST_CANDIDATES = 1024
"""How many ranks the top_p search takes at first; most nuclei are smaller."""
CANDIDATES_GROWTH = 8
GPU_ROWS_PER_LAUNCH = 64
"""Bounds the float64 temporaries: 64 rows of 128k tokens are 64 MiB each."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The parameters of the rows that sample, as arrays [n]."""

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    sequence_index: npt.NDArray[np.int64]
    output_position: npt.NDArray[np.int64]
    """How many tokens the sequence has generated before this one."""

    def __len__(self) -> int:
        return len(self.temperature)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the rows [n] drew."""

    token_ids: npt.NDArray[np.int64]
    """Meaningless where `is_sound` is false."""
    is_sound: npt.NDArray[np.bool_]
    """False where the logits hold a NaN, or their largest is infinite."""


def sample(logits: torch.Tensor, rows: SamplingRows) -> Sampled:
    """Draw one token a row from `logits` [n, vocab_size] float32."""
    best = logits.argmax(dim=-1)  # the lowest id among equals; a NaN counts as the largest
    highest = logits.gather(1, best[:, None])[:, 0]
    is_sound = torch.isfinite(highest).cpu().numpy()
    token_ids = best.cpu().numpy()
    drawn = np.flatnonzero((rows.temperature >= GREEDY_BELOW_TEMPERATURE) & is_sound)
    if len(drawn):
        numbers = uniforms(
            rows.seed[drawn], rows.sequence_index[drawn], rows.output_position[drawn]
        )
        num_together = rows_per_launch(logits.device)
        for start in range(0, len(drawn), num_together):
            group = slice(start, start + num_together)
            token_ids[drawn[group]] = _draw(logits, rows, drawn[group], numbers[group])
    return Sampled(token_ids, is_sound)


def rows_per_launch(device: torch.device) -> int:
    """How many rows are drawn in one go."""
    return 1 if device.type == "cpu" else GPU_ROWS_PER_LAUNCH


def _draw(
    logits: torch.Tensor,
    rows: SamplingRows,
    chosen: npt.NDArray[np.intp],
    numbers: npt.NDArray[np.float64],
) -> npt.NDArray[np.int64]:
    """Tokens of the `chosen` rows [m], by their uniform `numbers` [m]."""
    device = logits.device
    scores = logits[torch.from_numpy(chosen).to(device)]  # [m, vocab_size]
    temperature = _column(rows.temperature[chosen], device)
    highest = scores.amax(dim=-1, keepdim=True).double()
    weights = scores.double().sub_(highest).div_(temperature).exp_()
    num_ranks = _num_ranks(scores, weights, highest, rows, chosen)
    weights = _keep_ranks(weights, scores, num_ranks)
    min_p = rows.min_p[chosen]
    if (min_p > 0).any():
        weights.masked_fill_(weights < _column(min_p, device), 0.0)
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
    chosen: npt.NDArray[np.intp],
) -> npt.NDArray[np.int64]:
    """How many of the first ranks top_k and top_p leave to each row [m]."""
    vocab_size = scores.shape[1]
    top_k = rows.top_k[chosen]
    num_ranks = np.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    top_p = rows.top_p[chosen]
    nucleus = np.flatnonzero(top_p < 1.0)
    if len(nucleus):
        picked = torch.from_numpy(nucleus).to(scores.device)
        num_ranks[nucleus] = _nucleus_ranks(
            scores[picked],
            weights[picked],
            highest[picked],
            _column(rows.temperature[chosen][nucleus], scores.device),
            num_ranks[nucleus],
            top_p[nucleus],
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
