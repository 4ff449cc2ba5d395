"""Draws the next token of each row from its logits, by one rule.

For a row with temperature T, in this order:

    log-probabilities   of the model's own logits, before all that follows: `worker_svc.logprobs`
    rules     penalties, biases, exclusions by token id: `worker_svc.logit_rules`
    mask      of a constraint, which leaves the tokens that may come: `worker_svc.token_masks`
    w[t] = exp((logit[t] - max logit) / T)              float64
    rank      by logit, highest first, equal logits by the lower token id
    top_k     keeps the first k ranks
    top_p     keeps, of those, the fewest first ranks whose weights reach top_p of their sum
    min_p     keeps, of those, the tokens with w >= min_p (the best token has w = 1)
    typical_p keeps, of those, by the entropy H of their distribution p, the tokens in the order of
              |-log p[t] - H|, least first, until their weights reach typical_p of the sum; equals
              of the last stay (Meister et al., Locally Typical Sampling, TACL 2023, section 4)
    draw      the first token, in the order of ids, at which the running sum of the kept weights
              passes u * (their sum), u from `worker_svc.philox`

A row with a temperature below GREEDY_BELOW_TEMPERATURE takes its first rank after the rules.

On the CPU each row is computed by itself, so that its token can't depend on its neighbours; on a
GPU many rows go in one launch, where the order of a row's float64 sums is the device's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shared.sampling import GREEDY_BELOW_TEMPERATURE
from worker_svc.draw_batch import draw_batch
from worker_svc.draw_row import draw_row
from worker_svc.philox import uniforms
from worker_svc.sampling_rows import SamplingRows


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the rows [n] drew."""

    token_ids: npt.NDArray[np.int64]
    """Meaningless where `is_sound` is false."""
    is_sound: npt.NDArray[np.bool_]
    """False where the logits hold a NaN, or their largest is infinite; so also where nothing is
    left to draw."""
    is_empty: npt.NDArray[np.bool_]
    """True where nothing is left to draw."""


def sample(logits: torch.Tensor, rows: SamplingRows) -> Sampled:
    """Draw one token a row from `logits` [n, vocab_size] float32, which rules and masks have gone
    over."""
    token_ids, highest = _best(logits)
    is_sound = np.isfinite(highest)
    drawn = np.flatnonzero((rows.temperature >= GREEDY_BELOW_TEMPERATURE) & is_sound)
    if len(drawn):
        chosen = rows.take(drawn)
        numbers = uniforms(chosen.seed, chosen.sequence_index, chosen.output_position)
        if logits.device.type == "cpu":
            for i, row in enumerate(drawn):
                token_ids[row] = draw_row(logits[row], chosen, i, float(numbers[i]))
        else:
            token_ids[drawn] = draw_batch(logits, drawn, chosen, numbers)
    return Sampled(token_ids, is_sound, np.isneginf(highest))


def _best(logits: torch.Tensor) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The likeliest token of each row and its logit; the lowest id among equals, NaN above all."""
    if logits.device.type == "cpu":
        array = logits.numpy()
        best = array.argmax(axis=1)  # vectorised, where torch's is not
        return best, array[np.arange(len(best)), best]
    on_device = logits.argmax(dim=-1)
    highest = logits.gather(1, on_device[:, None])[:, 0]
    return on_device.cpu().numpy(), highest.cpu().numpy()
