"""Paged attention over a ragged batch: which kernel computes which rows.

Sequences with one new token go to the decode kernel, the others to the prefill kernel; a batch of
both launches both, and each passes over what is not its own. A row is thus computed in the same
order whatever else is in the batch.
"""

from __future__ import annotations

import math

import torch
import triton.language as tl

from kernels.interface import AttentionBatch
from kernels.triton.attention_decode import SPLIT_TOKENS, decode_kernel, max_splits, merge_kernel
from kernels.triton.attention_prefill import prefill_kernel
from kernels.triton.tiling import Tiling, decode_tiling, prefill_tiling

_TRITON_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
_BLOCK_SIZE_STEP = 8
_HEAD_DIMS = range(32, 257)


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    batch: AttentionBatch,
    scale: float,
) -> torch.Tensor:
    """See `Kernels.paged_attention`. `query` may be a view whose last dimension is contiguous."""
    _check(query, kv_cache, batch)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    num_seqs = batch.seq_lens.shape[0]
    if num_seqs == 0:
        return output
    keys, values = kv_cache[:, layer, :, 0, 0], kv_cache[:, layer, :, 0, 1]
    scale = scale * math.log2(math.e)
    _decode(query, keys, values, batch, scale, output)
    if batch.max_query_len > 1:
        _prefill(query, keys, values, batch, scale, output)
    return output


def _decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    output: torch.Tensor,
) -> None:
    num_seqs = batch.seq_lens.shape[0]
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = keys.shape[1]
    options = decode_options(query, keys)
    num_splits = min(options["MAX_SPLITS"], -(-batch.max_seq_len // SPLIT_TOKENS))
    shape = (num_seqs, num_heads, num_splits)
    partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device)
    partial_max = torch.empty(shape, dtype=torch.float32, device=query.device)
    partial_sum = torch.empty_like(partial_max)
    decode_kernel[(num_seqs, num_kv_heads, num_splits)](
        query, keys, values, batch.block_tables, batch.query_start, batch.seq_lens,
        partial, partial_max, partial_sum, num_splits,
        *_strides(query, keys, batch), scale, **options,
    )  # fmt: skip
    merge_kernel[(num_seqs, num_heads)](
        partial, partial_max, partial_sum, batch.query_start, batch.seq_lens, output, num_splits,
        **merge_options(query, keys),
    )  # fmt: skip


def _prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    output: torch.Tensor,
) -> None:
    num_seqs = batch.seq_lens.shape[0]
    options = prefill_options(query, keys)
    num_tiles = query.shape[0] // (options["NUM_ROWS"] // options["GROUP"]) + num_seqs
    prefill_kernel[(num_tiles, keys.shape[1])](
        query, keys, values, batch.block_tables, batch.query_start, batch.seq_lens,
        output, num_seqs, *_strides(query, keys, batch), scale, **options,
    )  # fmt: skip


def decode_options(query: torch.Tensor, keys: torch.Tensor) -> dict[str, int]:
    """Compile-time arguments of `decode_kernel` for tensors of these shapes and types.

    keys   [num_blocks, num_kv_heads, block_size, head_dim]
    """
    group = query.shape[1] // keys.shape[1]
    tiling = decode_tiling(group, query.shape[2], _compute_type(query, keys).itemsize)
    return {
        **_common_options(query, keys, tiling),
        "SPLIT_TOKENS": SPLIT_TOKENS,
        "MAX_SPLITS": max_splits(keys.shape[1]),
    }


def prefill_options(query: torch.Tensor, keys: torch.Tensor) -> dict[str, int]:
    """Compile-time arguments of `prefill_kernel`, as in `decode_options`."""
    group = query.shape[1] // keys.shape[1]
    tiling = prefill_tiling(group, query.shape[2], _compute_type(query, keys).itemsize)
    return _common_options(query, keys, tiling)


def merge_options(query: torch.Tensor, keys: torch.Tensor) -> dict[str, int]:
    """Compile-time arguments of `merge_kernel`, as in `decode_options`."""
    options = decode_options(query, keys)
    names = ("HEAD_DIM", "SPLIT_TOKENS", "MAX_SPLITS", "PADDED_DIM")
    return {name: options[name] for name in names}


def _common_options(query: torch.Tensor, keys: torch.Tensor, tiling: Tiling) -> dict[str, int]:
    return {
        "GROUP": query.shape[1] // keys.shape[1],
        "HEAD_DIM": query.shape[2],
        "BLOCK_SIZE": keys.shape[2],
        "NUM_ROWS": tiling.num_rows,
        "NUM_KEYS": tiling.num_keys,
        "PADDED_DIM": tiling.padded_dim,
        "COMPUTE": _TRITON_TYPES[_compute_type(query, keys)],
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
    }


def _compute_type(query: torch.Tensor, keys: torch.Tensor) -> torch.dtype:
    """What is multiplied: the common type, or float32 if query and cache differ."""
    return query.dtype if query.dtype == keys.dtype else torch.float32


def _strides(query: torch.Tensor, keys: torch.Tensor, batch: AttentionBatch) -> tuple[int, ...]:
    """In the order of both kernels' arguments."""
    return (*query.stride()[:2], *keys.stride()[:3], batch.block_tables.stride(0))


def _check(query: torch.Tensor, kv_cache: torch.Tensor, batch: AttentionBatch) -> None:
    assert query.dim() == 3 and kv_cache.dim() == 7
    assert query.dtype in _TRITON_TYPES and kv_cache.dtype in _TRITON_TYPES
    _, num_heads, head_dim = query.shape
    num_kv_heads, blocks_per_slab, _, block_size, row_size = kv_cache.shape[2:]
    assert blocks_per_slab == 1 and row_size == head_dim and head_dim in _HEAD_DIMS
    assert num_heads % num_kv_heads == 0
    assert block_size > 0 and block_size % _BLOCK_SIZE_STEP == 0
    assert query.stride(2) == 1 and kv_cache.is_contiguous()
    num_seqs = batch.seq_lens.shape[0]
    assert batch.query_start.shape == (num_seqs + 1,) and batch.block_tables.shape[0] == num_seqs
    assert batch.block_tables.stride(1) == 1
    for index in (batch.query_start, batch.seq_lens, batch.block_tables):
        assert index.dtype == torch.int32 and index.device == query.device == kv_cache.device
