"""The kernels' signatures: what every implementation must offer, over tensors alone.

The KV cache of a replica is one tensor:

    kv_cache  # [num_blocks, num_layers, 2, num_kv_heads, block_size, row_size]; 2 = keys, values

On CUDA, and on the host for what is swapped out, it is BLOCK_MAJOR in memory; on the CPU it is
HEAD_MAJOR.

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

# A KV cache's dimensions in the order in which they lie in memory; torch.empty_permuted takes it.
BLOCK_MAJOR = (0, 1, 2, 3, 4, 5)
"""A block over all layers is one contiguous run of bytes: a swap or a copy is one move."""
HEAD_MAJOR = (1, 3, 0, 2, 4, 5)
"""The blocks of a layer's head lie one after another, each its keys and then its values: a sequence
whose blocks are neighbours is read as one stream."""


def kv_row_size(head_dim: int, dtype: torch.dtype) -> int:
    """Elements that a KV cache of `dtype` has for the key, or the value, of a position and head."""
    return head_dim + (KV_SCALE_BYTES if dtype == torch.int8 else 0)


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
