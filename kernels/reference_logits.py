"""Rules, masks and draws on the CPU, row by row: the oracle of Triton's.

A module of functions; it satisfies `kernels.logits.LogitKernels` as it stands.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kernels.draw_row import draw_row
from kernels.logits import Drawn, Draws, LogitEntries, LogitRules, RowMask, drawn_best


def apply_rules(logits: torch.Tensor, rules: LogitRules) -> None:
    """See `LogitKernels.apply_rules`."""
    if len(rules.penalties):
        at = _index(rules.penalised)
        penalty = torch.from_numpy(rules.penalties)
        values = logits[at]
        values = torch.where(values > 0, values / penalty, values * penalty)
        logits[at] = values - torch.from_numpy(rules.offsets)
    if len(rules.biases):
        logits[_index(rules.biased)] += torch.from_numpy(rules.biases)
    if len(rules.excluded.ids):
        logits[_index(rules.excluded)] = -torch.inf


def mask_tokens(logits: torch.Tensor, masks: Sequence[RowMask]) -> None:
    """See `LogitKernels.mask_tokens`."""
    for mask in masks:
        # numpy, as torch would wake its threads for each of these small rows.
        row = logits[mask.row].numpy()
        if len(mask.bits):
            np.copyto(row, -np.inf, where=~mask.is_allowed(len(row)))
            continue
        kept = row[mask.ids]
        row.fill(-np.inf)
        row[mask.ids] = kept


def draw_tokens(logits: torch.Tensor, draws: Draws) -> Drawn:
    """See `LogitKernels.draw_tokens`."""
    array = logits.numpy()
    token_ids = array.argmax(axis=1)  # vectorised, where torch's is not; NaN above all
    highest = array[np.arange(len(array)), token_ids]
    drawn = drawn_best(token_ids, highest)
    for row in np.flatnonzero((draws.temperature > 0) & drawn.is_sound).tolist():
        token_ids[row] = draw_row(logits[row], draws, row)
    return drawn


def _index(entries: LogitEntries) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(entries.rows), torch.from_numpy(entries.ids)
