"""A decoder-only model as tensors: its weights as stored, and the one call that runs a step.

Two implementations: `worker_svc.models.llama` (torch operations and `kernels.interface.Kernels`,
on any device) and `kernels.cpu` (one native call for the whole step).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.interface import AttentionBatch
from kernels.logits import Drawn

DENSE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Formats of matrices that are stored number by number."""


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A weight matrix [num_rows, num_columns] (output by input), as its file stores it.

    `data` is a dense tensor [num_rows, num_columns] of the format's type in DENSE_DTYPES, or uint8
    [num_rows, bytes per row] of GGUF blocks of that type ("Q4_1", "Q8_0", ...). It may be a view of
    a read-only memory map: it is not written to.
    """

    num_rows: int
    num_columns: int
    format: str
    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Query and key rows stand in the half-rotated order of transformers: rotary
    position embedding turns dimension d with dimension d + head_dim / 2."""

    attention_norm: torch.Tensor  # [hidden_size] float32
    query: StoredMatrix  # [num_heads * head_dim, hidden_size]
    key: StoredMatrix  # [num_kv_heads * head_dim, hidden_size]
    value: StoredMatrix  # [num_kv_heads * head_dim, hidden_size]
    attention_output: StoredMatrix  # [hidden_size, num_heads * head_dim]
    mlp_norm: torch.Tensor  # [hidden_size] float32
    gate: StoredMatrix  # [intermediate_size, hidden_size]
    up: StoredMatrix  # [intermediate_size, hidden_size]
    down: StoredMatrix  # [hidden_size, intermediate_size]
    query_bias: torch.Tensor | None = None  # float32, as long as its matrix has rows
    key_bias: torch.Tensor | None = None
    value_bias: torch.Tensor | None = None
    attention_output_bias: torch.Tensor | None = None
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


NO_ROWS = torch.empty(0, dtype=torch.int64)


def _keep_pages() -> None:
    """For weights that are no view of a file."""


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole model of the Llama family."""

    embedding: StoredMatrix  # [vocab_size, hidden_size]
    layers: Sequence[LayerWeights]
    final_norm: torch.Tensor  # [hidden_size] float32
    output: StoredMatrix | None  # [vocab_size, hidden_size]; None: tied to the embedding
    inverse_frequencies: torch.Tensor  # [head_dim / 2] float32, rotary scaling applied
    release_pages: Callable[[], None] = _keep_pages
    """For a decoder that has its own copy of most: gives back the memory in which the file stands.
    What is read of the tensors later comes from the file again."""


@dataclass(frozen=True, slots=True)
class StepLogits:
    """What a step gives of its rows; it holds until the next step."""

    logits: torch.Tensor  # [n, vocab_size] float32, of the logit rows
    greedy: Drawn  # [m], of the greedy rows


class Decoder(Protocol):
    """Runs steps of one model."""

    def forward(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        kv_cache: torch.Tensor,
        logit_rows: torch.Tensor,
        greedy_rows: torch.Tensor = NO_ROWS,
    ) -> StepLogits:
        """Computes the step's tokens and stores their keys and values in `kv_cache` (in place).

        token_ids   [num_tokens] int64, in the row order of `batch`
        kv_cache    [num_slabs, num_layers, num_kv_heads, blocks_per_slab, 2, block_size, row_size],
                    see `kernels.interface`; what stands in the keys and in the values of a block
                    and head is the decoder's own business
        logit_rows  [n] int64, rows whose logits are wanted
        greedy_rows [m] int64, others of which the likeliest next token is all that is wanted
        """
        ...
