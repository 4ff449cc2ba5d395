"""Log-probabilities of tokens by the model's own logits.

log_prob[t] = logit[t] - max logit - log(sum of exp(logit - max logit)), in float64. On the CPU each
row is summed by itself in one order, so that what is told of it can't depend on its neighbours; on
a GPU several rows go in one launch.

rank[t] = 1 + how many logits are larger, or equal at a lower id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shared.logprobs import NO_LOGPROBS, LogprobRows

PLACES_PER_LAUNCH = 64
"""Bounds the float64 temporaries: 64 rows of 128k tokens are 64 MiB each."""


@dataclass(slots=True)
class PlaceLogprobs:
    """What one step tells of successive places of one sequence."""

    num_top: int
    log_probs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    top_token_ids: list[int] = field(default_factory=list)
    top_log_probs: list[float] = field(default_factory=list)

    def add(self, logits: torch.Tensor, token_ids: Sequence[int]) -> None:
        """Take the next places, whose tokens are `token_ids` [m], by their `logits`
        [m, vocab_size] float32; the largest of each row is finite, and no one is NaN."""
        # One by one on the CPU: there the shape of an operation may change its order of additions.
        size = 1 if logits.device.type == "cpu" else PLACES_PER_LAUNCH
        for first in range(0, len(token_ids), size):
            tokens = torch.tensor(token_ids[first : first + size], device=logits.device)
            self._add_part(logits[first : first + size], tokens[:, None])

    def _add_part(self, logits: torch.Tensor, token_ids: torch.Tensor) -> None:
        """`logits` [m, vocab_size], `token_ids` [m, 1]."""
        chosen = logits.gather(1, token_ids)
        all_ids = torch.arange(logits.shape[1], device=logits.device)
        before = (logits > chosen) | ((logits == chosen) & (all_ids < token_ids))
        self.ranks += (before.sum(dim=-1) + 1).tolist()
        best = best_ids(logits, self.num_top)
        self.top_token_ids += best.flatten().tolist()
        highest, log_total = log_normalizer(logits)
        for log_probs, ids in ((self.log_probs, token_ids), (self.top_log_probs, best)):
            of_ids = logits.gather(1, ids).double() - highest - log_total
            log_probs.extend(of_ids.flatten().tolist())


def flat_rows(told: Mapping[int, PlaceLogprobs]) -> LogprobRows:
    """What is told of each handle, in the order of `told`."""
    if not told:
        return NO_LOGPROBS
    parts = told.values()
    return LogprobRows(
        handles=list(told),
        num_places=[len(part.log_probs) for part in parts],
        num_tops=[part.num_top for part in parts],
        log_probs=[value for part in parts for value in part.log_probs],
        ranks=[value for part in parts for value in part.ranks],
        top_token_ids=[value for part in parts for value in part.top_token_ids],
        top_log_probs=[value for part in parts for value in part.top_log_probs],
    )


def best_ids(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The likeliest tokens [m, count] of each row of `logits` [m, vocab_size], best first, equal
    ones by the lower id; `count` is at most vocab_size."""
    if not count:
        return torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    if logits.device.type != "cpu":
        return logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return torch.stack([_best_of_row(row, count) for row in logits])


def _best_of_row(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The same of one row, without the order of all the others."""
    least = logits.topk(count).values[-1]
    ids = (logits >= least).nonzero()[:, 0]  # ascending; equals of the least may be too many
    return ids[logits[ids].sort(descending=True, stable=True).indices[:count]]


def log_normalizer(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of each row of `logits` [m, vocab_size], and the logarithm of the sum of
    exp(logit - largest); [m, 1] float64 each."""
    highest = logits.amax(dim=-1, keepdim=True).double()
    weights = (logits.double() - highest).exp_()
    if logits.device.type == "cpu":
        # numpy adds in an order that no number of threads changes
        total = torch.tensor([[float(row.sum())] for row in weights.numpy()], dtype=torch.float64)
    else:
        total = weights.sum(dim=-1, keepdim=True)
    return highest, total.log()
