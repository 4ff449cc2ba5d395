"""Keeps constrained sequences to the tokens that their plan allows: the logits of all others become
-infinity, before temperature and filters see them. Where nothing finite is left, the row is unsound
and its sequence fails alone."""

from __future__ import annotations

import numpy as np
import torch

from kernels.logits import Ids, LogitKernels, RowMask
from shared.errors import ProtocolError
from shared.plan import StepPlan, TokenMask


def check_masks(plan: StepPlan, vocab_size: int) -> None:
    """Raises ProtocolError for a mask of a sequence that does not sample in this step, or one that
    is not of this vocabulary."""
    if not plan.masks:
        return
    chunks = zip(plan.chunk_handles, plan.chunk_samples, strict=True)
    sampling = {*plan.decode_handles, *(handle for handle, samples in chunks if samples)}
    for handle, mask in zip(plan.masked_handles, plan.masks, strict=True):
        if handle not in sampling:
            raise ProtocolError(f"the plan masks sequence {handle}, which doesn't sample")
        if mask.bits and len(mask.bits) != -(-vocab_size // 8):
            raise ProtocolError(f"a mask of {len(mask.bits)} bytes is not of this vocabulary")
        if max(mask.token_ids, default=0) >= vocab_size:
            raise ProtocolError(f"a mask allows token {max(mask.token_ids)} beyond the vocabulary")


def apply_masks(logits: torch.Tensor, rows: Ids, plan: StepPlan, kernels: LogitKernels) -> None:
    """Mask `logits` [n, vocab_size] of the sampling sequences `rows` [n] in place, by the checked
    masks of `plan`. Those of sequences that failed earlier have no row, and are passed over."""
    place_of = {row: place for place, row in enumerate(rows.tolist())}
    masks = [
        _row_mask(place_of[handle], mask)
        for handle, mask in zip(plan.masked_handles, plan.masks, strict=True)
        if handle in place_of
    ]
    kernels.mask_tokens(logits, masks)


def _row_mask(place: int, mask: TokenMask) -> RowMask:
    ids = np.array(mask.token_ids, np.int64)
    return RowMask(place, ids, np.frombuffer(mask.bits, np.uint8))
