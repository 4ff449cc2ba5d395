"""Copies whole KV blocks: within a device by a kernel, between host and device by plain copies."""

# Kernels are a language of their own: Triton types their arguments at each launch.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# ruff: noqa: N803 (what is fixed at compile time stands in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl

WORDS = 4096
"""32-bit words that one program copies: 16 KiB, eight 16-byte accesses per thread of 4 warps."""


@triton.jit
def copy_kernel(
    source,  # [num_blocks, num_words] int32
    target,  # [num_blocks, num_words] int32, written
    source_blocks,  # [n] int64
    target_blocks,
    num_words,
    WORDS: tl.constexpr,
):
    """Program (pair of blocks, run of WORDS)."""
    pair = tl.program_id(0)
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    present = words < num_words
    source_start = tl.load(source_blocks + pair) * num_words
    target_start = tl.load(target_blocks + pair) * num_words
    tl.store(target + target_start + words, tl.load(source + source_start + words, mask=present),
             mask=present)  # fmt: skip


def copy_blocks(
    source: torch.Tensor,
    target: torch.Tensor,
    source_blocks: torch.Tensor,
    target_blocks: torch.Tensor,
) -> None:
    """See `Kernels.copy_blocks`.

    Copies between host and device are queued on the current stream; a pinned host cache lets them
    run beside the host, which must leave the blocks alone until the stream has passed.
    """
    assert source.dtype == target.dtype and source.shape[1:] == target.shape[1:]
    assert source.is_contiguous() and target.is_contiguous() and source.shape[3] == 1
    assert source_blocks.shape == target_blocks.shape
    if source_blocks.numel() == 0:
        return
    if source.device != target.device:
        for first_source, first_target, length in runs(source_blocks, target_blocks):
            target[first_target : first_target + length].copy_(
                source[first_source : first_source + length], non_blocking=True
            )
        return
    source_words, target_words = _as_words(source), _as_words(target)
    num_words = source_words.shape[1]
    copy_kernel[(source_blocks.numel(), triton.cdiv(num_words, WORDS))](
        source_words,
        target_words,
        source_blocks.to(source.device, non_blocking=True),
        target_blocks.to(source.device, non_blocking=True),
        num_words,
        WORDS=WORDS,
    )


def runs(source_blocks: torch.Tensor, target_blocks: torch.Tensor) -> list[tuple[int, int, int]]:
    """Pairs of blocks that ascend together, joined: (first source, first target, length) each."""
    joined: list[tuple[int, int, int]] = []
    for source, target in zip(source_blocks.tolist(), target_blocks.tolist(), strict=True):
        if joined:
            first_source, first_target, length = joined[-1]
            if (source, target) == (first_source + length, first_target + length):
                joined[-1] = (first_source, first_target, length + 1)
                continue
        joined.append((source, target, 1))
    return joined


def _as_words(cache: torch.Tensor) -> torch.Tensor:
    """[num_blocks, num_words] int32 over the same memory."""
    return cache.view(cache.shape[0], -1).view(torch.int32)
