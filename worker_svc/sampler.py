"""Draws the next token of each row from its logits, in this order:

    log-probabilities   of the model's own logits, before all that follows: `worker_svc.logprobs`
    rules     penalties, biases, exclusions by token id: `worker_svc.logit_rules`
    mask      of a constraint, which leaves the tokens that may come: `worker_svc.token_masks`
    draw      temperature, top_k, top_p, min_p, typical_p by the rule of `kernels.draw_row`, with a
              number from `worker_svc.philox`

A row with a temperature below GREEDY_BELOW_TEMPERATURE takes its first rank after the rules.

Each row is computed by itself, on the CPU as on a GPU, so that its token can't depend on its
neighbours. The two may draw different tokens where a number falls within a rounding of the border
between two.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels.logits import Drawn, Draws, LogitKernels
from shared.sampling import GREEDY_BELOW_TEMPERATURE
from worker_svc.philox import uniforms
from worker_svc.sampling_rows import SamplingRows


def sample(logits: torch.Tensor, rows: SamplingRows, kernels: LogitKernels) -> Drawn:
    """Draw one token a row from `logits` [n, vocab_size] float32, which rules and masks have gone
    over."""
    is_greedy = rows.temperature < GREEDY_BELOW_TEMPERATURE
    numbers = np.zeros(len(is_greedy))
    if not is_greedy.all():
        numbers = uniforms(rows.seed, rows.sequence_index, rows.output_position)
    draws = Draws(
        temperature=np.where(is_greedy, np.float32(0), rows.temperature),
        top_k=rows.top_k,
        top_p=rows.top_p,
        min_p=rows.min_p,
        typical_p=rows.typical_p,
        numbers=numbers,
    )
    return kernels.draw_tokens(logits, draws)
