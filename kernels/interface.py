"""The kernels' signatures: what every implementation must offer, over tensors alone.

The KV cache of a replica is one contiguous tensor of slabs, each of neighbouring blocks:

    kv_cache  # [num_slabs, num_layers, num_kv_heads, blocks_per_slab, 2, block_size, row_size]

2 = keys, values. Block b is number b % blocks_per_slab of slab b // blocks_per_slab (`block_of`):

    | slab 0                                                    | slab 1 ...
    | layer 0, head 0       | layer 0, head 1       | ...       | layer 0, head 0       | ...
    | block 0 | block 1 | ..| block 0 | block 1 | ..| ...       | block n | block n+1 |..| ...

On CUDA, and on the host for what is swapped out, a slab is one block, so that a block is one run of
bytes: a swap or a copy is one move. On the CPU it is many, so that a layer and head reads a context
whose blocks are neighbours as a few long streams; and memory that the system gives when it is first
written is taken slab by slab.

row_size is head_dim; where the cache is int8 (on the CPU alone), a row is head_dim quants and the
4 bytes of a float32 scale: a number is its quant times the scale, largest magnitude / 127.

A slot is `block * block_size + offset in block`. Query head h reads KV head
h // (num_heads // num_kv_heads). `kernels.reference` is the oracle and last fallback.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

KV_SCALE_BYTES = 4


def kv_row_size(head_dim: int, dtype: torch.dtype) -> int:
    """Elements that a KV cache of `dtype` has for the key, or the value, of a position and head."""
    return head_dim + (KV_SCALE_BYTES if dtype == torch.int8 else 0)


def block_of(kv_cache: torch.Tensor, block: int) -> torch.Tensor:
    """A block of a KV cache, as a view [num_layers, num_kv_heads, 2, block_size, row_size]."""
    blocks_per_slab = kv_cache.shape[3]
    return kv_cache[block // blocks_per_slab, :, :, block % blocks_per_slab]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where the tokens of a step stand; a ragged batch of sequences without padding.

    Sequence i owns rows query_start[i]:query_start[i + 1]; they are its last positions, so its row
    r (counted from the end, 1 = last) attends to the first seq_lens[i] - r + 1 positions.

        positions of sequence i    0 ............ seq_len - num_new ....... seq_len
                                   |-- in the cache already --|-- this step's --|
    """

    query_start: torch.Tensor  # [num_seqs + 1] int32
    seq_lens: torch.Tensor  # [num_seqs] int32, with this step's tokens
    block_tables: torch.Tensor  # [num_seqs, max_num_blocks] int32; beyond a sequence's: anything
    slots: torch.Tensor  # [num_tokens] int64, where each row's key and value go
    positions: torch.Tensor  # [num_tokens] int64
    max_query_len: int
    max_seq_len: int


class Kernels(Protocol):
    """One implementation, for one device. Outputs are new tensors unless a docstring says so."""

    def write_kv(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: int,
        slots: torch.Tensor,
    ) -> None:
        """Store keys and values [num_tokens, num_kv_heads, head_dim] at `slots`; in place."""

    def paged_attention(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: int,
        batch: AttentionBatch,
        scale: float,
    ) -> torch.Tensor:
        """Causal attention of `query` [num_tokens, num_heads, head_dim] over the cached keys and
        values of each row's sequence; the step's own are in the cache already. Same shape back."""

    def copy_blocks(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        source_blocks: torch.Tensor,
        target_blocks: torch.Tensor,
    ) -> None:
        """target[target_blocks[i]] = source[source_blocks[i]] over whole blocks; in place. The two
        caches may be one; block lists are int64 [n] on the CPU, targets distinct, and no target
        is also a source."""
