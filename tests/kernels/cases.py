"""Random ragged batches over a paged cache, from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from kernels.interface import AttentionBatch, block_of

NUM_LAYERS = 2
LAYER = 1


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's attention and its cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    query_dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32
    blocks_per_slab: int = 1

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class Case:
    """One step. Every slot that no sequence uses holds NaN, which no kernel may touch."""

    query: torch.Tensor  # [num_tokens, num_heads, head_dim]
    kv_cache: torch.Tensor
    batch: AttentionBatch
    keys: list[torch.Tensor]  # per sequence [seq_len, num_kv_heads, head_dim]
    values: list[torch.Tensor]


def slots_of(table: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """[n] int64 slots of a sequence's positions."""
    return table.long()[positions // block_size] * block_size + positions % block_size


def make_case(
    shape: Shape, lengths: list[tuple[int, int]], seed: int, device: torch.device
) -> Case:
    """A step of sequences given as (seq_len, number of new tokens), blocks scattered."""
    generator = torch.Generator().manual_seed(seed)
    size = shape.block_size
    counts = [-(-seq_len // size) for seq_len, _ in lengths]
    num_blocks = sum(counts) + 2
    order = torch.randperm(num_blocks, generator=generator)
    # Beyond a sequence's blocks a table may hold anything, so it holds what would fault.
    tables = torch.full((len(lengths), max(counts) + 1), 2**30, dtype=torch.int32)
    per_slab = shape.blocks_per_slab
    heads = (NUM_LAYERS, shape.num_kv_heads)
    dims = (-(-num_blocks // per_slab), *heads, per_slab, 2, size, shape.head_dim)
    cache = torch.full(dims, float("nan"), dtype=shape.cache_dtype)
    keys, values, slots, positions = [], [], [], []
    taken = 0
    for i, (seq_len, num_new) in enumerate(lengths):
        tables[i, : counts[i]] = order[taken : taken + counts[i]].int()
        taken += counts[i]
        kv = torch.randn(2, seq_len, shape.num_kv_heads, shape.head_dim, generator=generator)
        key, value = kv.to(shape.cache_dtype)
        every = torch.arange(seq_len)
        at = slots_of(tables[i], every, size)
        for position, slot in enumerate(at.tolist()):
            block = block_of(cache, slot // size)[LAYER]
            block[:, 0, slot % size] = key[position]
            block[:, 1, slot % size] = value[position]
        keys.append(key)
        values.append(value)
        slots.append(at[seq_len - num_new :])
        positions.append(every[seq_len - num_new :])
    news = [num_new for _, num_new in lengths]
    query = torch.randn(sum(news), shape.num_heads, shape.head_dim, generator=generator)
    batch = AttentionBatch(
        query_start=torch.tensor([0, *news]).cumsum(0).int().to(device),
        seq_lens=torch.tensor([seq_len for seq_len, _ in lengths]).int().to(device),
        block_tables=tables.to(device),
        slots=torch.cat(slots).to(device),
        positions=torch.cat(positions).to(device),
        max_query_len=max(news),
        max_seq_len=max(seq_len for seq_len, _ in lengths),
    )
    return Case(query.to(shape.query_dtype).to(device), cache.to(device), batch, keys, values)


def random_lengths(rng: random.Random, num_seqs: int, longest: int) -> list[tuple[int, int]]:
    """Decodes, whole prompts and chunks at any offset, in any order."""
    lengths = []
    for _ in range(num_seqs):
        seq_len = rng.randint(1, longest)
        kind = rng.choice(("decode", "prompt", "chunk"))
        new = {"decode": 1, "prompt": seq_len, "chunk": rng.randint(1, seq_len)}[kind]
        lengths.append((seq_len, new))
    return lengths
