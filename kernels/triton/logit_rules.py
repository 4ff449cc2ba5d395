"""Changes and excludes single logits, and masks whole rows, in place.

The rules of all rows are one list of entries for each kind of rule, a list one launch of one
kernel. They go in order, for a token may be penalised, biased and excluded, each by another
thread: only the end of a launch lets one see what the other stored.
"""

# Kernels are a language of their own: Triton types their arguments at each launch.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# ruff: noqa: N803 (what is fixed at compile time stands in capitals)

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.logits import Floats, LogitEntries, LogitRules, RowMask

ENTRIES = 256
"""Of a program of rules; they are few and far apart."""

TOKENS = 1024
"""Of a program of masks: 8 per thread of 4 warps."""


@triton.jit(do_not_specialize=["num_entries"])
def rule_kernel(
    logits,  # [n, vocab_size] float32, changed
    entries,  # [2, num_entries] int64: rows, ids
    values,  # [2, num_entries] float32: penalties and offsets, or biases
    num_entries,
    stride_row,
    KIND: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Program (run of ENTRIES). As exact as `kernels.reference_logits`: products and sums round
    one by one, which needs `enable_fp_fusion=False`."""
    places = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    present = places < num_entries
    rows = tl.load(entries + places, mask=present, other=0)
    ids = tl.load(entries + num_entries + places, mask=present, other=0)
    target = logits + rows * stride_row + ids
    if KIND == "exclude":
        tl.store(target, tl.full([ENTRIES], float("-inf"), tl.float32), mask=present)
    else:
        changed = tl.load(target, mask=present, other=0.0)
        value = tl.load(values + places, mask=present, other=1.0)
        if KIND == "bias":
            changed = changed + value
        else:
            offset = tl.load(values + num_entries + places, mask=present, other=0.0)
            changed = tl.where(changed > 0, tl.div_rn(changed, value), changed * value) - offset
        tl.store(target, changed, mask=present)


@triton.jit
def mask_kernel(
    logits,  # [n, vocab_size] float32, changed
    rows,  # [m] int64
    bits,  # [m, num_bytes] uint8, little-endian
    num_bytes,
    stride_row,
    vocab_size,
    TOKENS: tl.constexpr,
):
    """Program (mask, run of TOKENS)."""
    place = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    present = ids < vocab_size
    octets = tl.load(bits + place * num_bytes + ids // 8, mask=present, other=0).to(tl.int32)
    excluded = present & (((octets >> (ids % 8)) & 1) == 0)
    target = logits + tl.load(rows + place) * stride_row + ids
    tl.store(target, tl.full([TOKENS], float("-inf"), tl.float32), mask=excluded)


def apply_rules(logits: torch.Tensor, rules: LogitRules) -> None:
    """See `LogitKernels.apply_rules`."""
    _check(logits)
    _apply(logits, rules.penalised, [rules.penalties, rules.offsets], "penalise")
    _apply(logits, rules.biased, [rules.biases], "bias")
    _apply(logits, rules.excluded, [], "exclude")


def _apply(
    logits: torch.Tensor, entries: LogitEntries, values: Sequence[Floats], kind: str
) -> None:
    num_entries = len(entries.ids)
    if not num_entries:
        return
    where = np.stack((entries.rows, entries.ids))
    what = np.stack(values) if values else np.zeros((0, num_entries), np.float32)
    rule_kernel[(triton.cdiv(num_entries, ENTRIES),)](
        logits,
        torch.from_numpy(where).to(logits.device),
        torch.from_numpy(what).to(logits.device),
        num_entries,
        logits.stride(0),
        **rule_options(kind),
    )


def mask_tokens(logits: torch.Tensor, masks: Sequence[RowMask]) -> None:
    """See `LogitKernels.mask_tokens`."""
    _check(logits)
    if not masks:
        return
    vocab_size = logits.shape[1]
    bits = np.stack([mask.packed(vocab_size) for mask in masks])
    rows = torch.tensor([mask.row for mask in masks], dtype=torch.int64)
    mask_kernel[(len(masks), triton.cdiv(vocab_size, TOKENS))](
        logits,
        rows.to(logits.device),
        torch.from_numpy(bits).to(logits.device),
        bits.shape[1],
        logits.stride(0),
        vocab_size,
        **mask_options(),
    )


def rule_options(kind: str) -> dict[str, int | str]:
    """Compile-time arguments of `rule_kernel`; `kind` is "penalise", "bias" or "exclude"."""
    return {"KIND": kind, "ENTRIES": ENTRIES, "enable_fp_fusion": False}


def mask_options() -> dict[str, int]:
    """Compile-time arguments of `mask_kernel`."""
    return {"TOKENS": TOKENS}


def _check(logits: torch.Tensor) -> None:
    assert logits.dtype == torch.float32 and logits.dim() == 2 and logits.stride(1) == 1
