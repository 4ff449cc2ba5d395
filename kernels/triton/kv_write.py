"""Stores a step's keys and values in the paged cache."""

# Kernels are a language of their own: Triton types their arguments at each launch.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# ruff: noqa: N803 (what is fixed at compile time stands in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl

ELEMENTS = 1024
"""Elements of a token that one program moves: 8 per thread of 4 warps, one 16-byte access each."""


@triton.jit
def write_kernel(
    keys,  # [num_tokens, num_kv_heads, head_dim]
    values,
    key_cache,  # [num_blocks, num_kv_heads, block_size, head_dim], this layer's, written
    value_cache,
    slots,  # [num_tokens] int64
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_block,
    stride_kv_head,
    stride_slot,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Program (token, run of ELEMENTS over its heads and dimensions)."""
    token = tl.program_id(0).to(tl.int64)
    elements = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    present = elements < NUM_KV_HEADS * HEAD_DIM
    heads, dims = elements // HEAD_DIM, elements % HEAD_DIM
    slot = tl.load(slots + token)
    target = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot
    target = target + heads * stride_kv_head + dims
    key = tl.load(keys + token * stride_key_token + heads * stride_key_head + dims, mask=present)
    value = tl.load(
        values + token * stride_value_token + heads * stride_value_head + dims, mask=present
    )
    tl.store(key_cache + target, key.to(key_cache.dtype.element_ty), mask=present)
    tl.store(value_cache + target, value.to(value_cache.dtype.element_ty), mask=present)


def write_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
) -> None:
    """See `Kernels.write_kv`. Both inputs may be views whose last dimension is contiguous."""
    num_tokens, num_kv_heads, head_dim = keys.shape
    assert values.shape == keys.shape and kv_cache.dim() == 7
    assert kv_cache.shape[2:4] == (num_kv_heads, 1) and kv_cache.shape[6] == head_dim
    assert keys.stride(2) == values.stride(2) == 1 and kv_cache.is_contiguous()
    assert slots.dtype == torch.int64 and slots.shape == (num_tokens,) and slots.is_contiguous()
    assert keys.device == values.device == kv_cache.device == slots.device
    if num_tokens == 0:
        return
    key_cache, value_cache = kv_cache[:, layer, :, 0, 0], kv_cache[:, layer, :, 0, 1]
    write_kernel[(num_tokens, triton.cdiv(num_kv_heads * head_dim, ELEMENTS))](
        keys,
        values,
        key_cache,
        value_cache,
        slots,
        *keys.stride()[:2],
        *values.stride()[:2],
        *key_cache.stride()[:3],
        **write_options(kv_cache),
    )


def write_options(kv_cache: torch.Tensor) -> dict[str, int]:
    """Compile-time arguments of `write_kernel`."""
    block_size, head_dim = kv_cache.shape[5:]
    return {
        "NUM_KV_HEADS": kv_cache.shape[2],
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "ELEMENTS": ELEMENTS,
    }
