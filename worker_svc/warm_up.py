"""Touches logits once in every way, so that no request waits while a kernel of these is compiled.

What a forward pass takes is compiled when `worker_svc.measure` runs one.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels.logits import NO_BITS, Draws, LogitEntries, LogitKernels, LogitRules, RowMask


def warm_up(kernels: LogitKernels, vocab_size: int, device: torch.device) -> None:
    """Rules of every kind, a mask, a draw with filters beside one without, and one greedy row
    behind another: where the vocabulary is no multiple of 4, its logits are not aligned to 16
    bytes, which takes a kernel of its own."""
    logits = torch.zeros((2, vocab_size), device=device)
    first = np.zeros(1, np.int64)
    entry = LogitEntries(first, first)
    ones = np.ones(1, np.float32)
    kernels.apply_rules(logits, LogitRules(entry, ones, ones, entry, ones, entry))
    kernels.mask_tokens(logits, [RowMask(0, np.array([vocab_size - 1]), NO_BITS)])
    draws = Draws(
        temperature=np.ones(2, np.float32),
        top_k=np.zeros(2, np.int64),
        top_p=np.array([1.0, 0.5], np.float32),
        min_p=np.zeros(2, np.float32),
        typical_p=np.ones(2, np.float32),
        numbers=np.zeros(2),
    )
    kernels.draw_tokens(logits, draws)
    kernels.draw_tokens(logits[1:], Draws.greedy(1))
