"""Keeps constrained sequences to the tokens that their plan allows: the logits of all others become
-infinity, before temperature and filters see them. Where nothing finite is left, the row is unsound
and its sequence fails alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from shared.errors import ProtocolError
from shared.plan import StepPlan, TokenMask

Ids = npt.NDArray[np.int64]


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


def apply_masks(logits: torch.Tensor, rows: Ids, plan: StepPlan) -> None:
    """Mask `logits` [n, vocab_size] of the sampling sequences `rows` [n] in place, by the checked
    masks of `plan`. Those of sequences that failed earlier have no row, and are passed over."""
    place_of = {row: place for place, row in enumerate(rows.tolist())}
    masks = [
        (place_of[handle], mask)
        for handle, mask in zip(plan.masked_handles, plan.masks, strict=True)
        if handle in place_of
    ]
    if logits.device.type == "cpu":
        # numpy, as torch would wake its threads for each of these small rows.
        for place, mask in masks:
            _mask_row(logits[place].numpy(), mask)
    elif masks:
        mask_together(logits, masks)


def mask_together(logits: torch.Tensor, masks: Sequence[tuple[int, TokenMask]]) -> None:
    """Mask rows of `logits` [n, vocab_size] in place, each named by its place: few launches, for
    GPUs."""
    allowed = np.stack([_is_allowed(mask, logits.shape[1]) for _, mask in masks])
    places = torch.tensor([place for place, _ in masks], device=logits.device)
    is_allowed = torch.from_numpy(allowed).to(logits.device)
    logits[places] = logits[places].masked_fill_(~is_allowed, -torch.inf)


def _mask_row(logits: npt.NDArray[np.float32], mask: TokenMask) -> None:
    """Mask one row [vocab_size] in place."""
    if mask.bits:
        np.copyto(logits, -np.inf, where=~_is_allowed(mask, len(logits)))
        return
    allowed = np.array(mask.token_ids, np.int64)
    kept = logits[allowed]
    logits.fill(-np.inf)
    logits[allowed] = kept


def _is_allowed(mask: TokenMask, vocab_size: int) -> npt.NDArray[np.bool_]:
    """[vocab_size] Whether each token may be drawn."""
    if mask.bits:
        packed = np.frombuffer(mask.bits, np.uint8)
        return np.unpackbits(packed, count=vocab_size, bitorder="little").view(np.bool_)
    is_allowed = np.zeros(vocab_size, np.bool_)
    is_allowed[list(mask.token_ids)] = True
    return is_allowed
