"""The kernels in plain torch, on any device: the oracle of every other, and the last fallback.

A module of functions; it satisfies `kernels.interface.Kernels` as it stands. Attention runs one
sequence at a time, in float32, so a sequence's result does not depend on its neighbours.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.interface import KV_SCALE_BYTES, AttentionBatch, block_of


def write_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
) -> None:
    """See `Kernels.write_kv`."""
    blocks_per_slab, block_size = kv_cache.shape[3], kv_cache.shape[5]
    blocks, offsets = slots // block_size, slots % block_size
    slabs, places = blocks // blocks_per_slab, blocks % blocks_per_slab
    # Index tensors apart from each other put the indexed dimension first: [num_tokens, ...].
    kv_cache[:, layer, :, :, 0][slabs, :, places, offsets] = _stored(keys, kv_cache.dtype)
    kv_cache[:, layer, :, :, 1][slabs, :, places, offsets] = _stored(values, kv_cache.dtype)


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    batch: AttentionBatch,
    scale: float,
) -> torch.Tensor:
    """See `Kernels.paged_attention`. Reads the batch's indices on the host."""
    output = torch.empty_like(query)
    starts = batch.query_start.tolist()
    blocks_per_slab, block_size = kv_cache.shape[3], kv_cache.shape[5]
    for sequence, seq_len in enumerate(batch.seq_lens.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        if rows.start == rows.stop:
            continue
        table = batch.block_tables[sequence, : -(-seq_len // block_size)].long()
        slabs, places = table // blocks_per_slab, table % blocks_per_slab
        output[rows] = _attend(query[rows], kv_cache[:, layer][slabs, :, places], seq_len, scale)
    return output


def copy_blocks(
    source: torch.Tensor,
    target: torch.Tensor,
    source_blocks: torch.Tensor,
    target_blocks: torch.Tensor,
) -> None:
    """See `Kernels.copy_blocks`. Block by block: to index all at once takes ten times as long."""
    for source_block, target_block in zip(
        source_blocks.tolist(), target_blocks.tolist(), strict=True
    ):
        block_of(target, target_block).copy_(block_of(source, source_block))


def _stored(vectors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of the cache [..., row_size] of vectors [..., head_dim]. One with a NaN or an infinity
    gets a NaN for its scale."""
    if dtype != torch.int8:
        return vectors.to(dtype)
    wide = vectors.float()
    scales = wide.abs().amax(dim=-1, keepdim=True) / 127
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    inverses = torch.where(scales > 1e-37, 1 / scales, 0)
    quants = (wide * inverses).nan_to_num(0.0).round().to(torch.int8)
    return torch.cat((quants, scales.view(torch.int8)), dim=-1)


def _loaded(rows: torch.Tensor) -> torch.Tensor:
    """Vectors [..., head_dim] in float32 of rows of the cache [..., row_size]."""
    if rows.dtype != torch.int8:
        return rows.float()
    scales = rows[..., -KV_SCALE_BYTES:].contiguous().view(torch.float32)
    return rows[..., :-KV_SCALE_BYTES].float() * scales


def _attend(query: torch.Tensor, blocks: torch.Tensor, seq_len: int, scale: float) -> torch.Tensor:
    """Attention of one sequence's last rows.

    query   [num_rows, num_heads, head_dim]
    blocks  [num_blocks, num_kv_heads, 2, block_size, row_size], the sequence's in order
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = blocks.shape[1]
    group = num_heads // num_kv_heads
    # [2, num_kv_heads, seq_len, head_dim]
    key, value = _loaded(blocks.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :seq_len])
    # The query heads of one KV head are rows of one matrix, so its keys are read once:
    # [num_kv_heads, num_rows * group, head_dim], row-major over (row, head of the group).
    packed = query.reshape(num_rows, num_kv_heads, group, head_dim).transpose(0, 1).flatten(1, 2)
    mask = None
    if num_rows > 1:
        first = seq_len - num_rows
        visible = torch.ones(num_rows, seq_len, dtype=torch.bool, device=query.device)
        mask = visible.tril(first).repeat_interleave(group, dim=0)[None, None]
    attended: torch.Tensor = functional.scaled_dot_product_attention(
        packed.float()[None], key[None], value[None], attn_mask=mask, scale=scale
    )
    by_row = attended.view(num_kv_heads, num_rows, group, head_dim).transpose(0, 1)
    return by_row.reshape(query.shape).to(query.dtype)
