"""Random tiny models in every weight format, and their exact float32 weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from kernels.decoder import DENSE_DTYPES, DecoderWeights, LayerWeights, StoredMatrix
from shared.model_spec import ModelSpec

HALVES = {  # byte offsets of a block's half-precision scales (first) and minima
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
FORMATS = (*DENSE_DTYPES, *HALVES)


@dataclass(frozen=True)
class Shape:
    """What the tests vary. The defaults are the smallest that every format takes."""

    hidden_size: int = 256
    intermediate_size: int = 256
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    num_layers: int = 2
    vocab_size: int = 53
    tied: bool = True
    biases: bool = False


def make_spec(shape: Shape) -> ModelSpec:
    return ModelSpec(
        name="tiny",
        path=Path("tiny.gguf"),
        file_format="gguf",
        architecture="llama",
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        context_length=2048,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        tie_word_embeddings=shape.tied,
        attention_bias=shape.biases,
        mlp_bias=shape.biases,
        bos_token_id=None,
        eos_token_ids=(),
        fingerprint="",
    )


def make_weights(
    shape: Shape, formats: tuple[str, ...], generator: torch.Generator
) -> DecoderWeights:
    """Random weights; the matrices take `formats` in turn."""
    turn = 0

    def matrix(num_rows: int, num_columns: int) -> StoredMatrix:
        nonlocal turn
        turn += 1
        return random_matrix(num_rows, num_columns, formats[turn % len(formats)], generator)

    def bias(size: int) -> torch.Tensor | None:
        return torch.randn(size, generator=generator) * 0.1 if shape.biases else None

    def norm(size: int) -> torch.Tensor:
        return 1 + torch.randn(size, generator=generator) * 0.1

    hidden, mlp = shape.hidden_size, shape.intermediate_size
    query_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layers = [
        LayerWeights(
            attention_norm=norm(hidden),
            query=matrix(query_size, hidden),
            key=matrix(kv_size, hidden),
            value=matrix(kv_size, hidden),
            attention_output=matrix(hidden, query_size),
            mlp_norm=norm(hidden),
            gate=matrix(mlp, hidden),
            up=matrix(mlp, hidden),
            down=matrix(hidden, mlp),
            query_bias=bias(query_size),
            key_bias=bias(kv_size),
            value_bias=bias(kv_size),
            attention_output_bias=bias(hidden),
            gate_bias=bias(mlp),
            up_bias=bias(mlp),
            down_bias=bias(hidden),
        )
        for _ in range(shape.num_layers)
    ]
    half = torch.arange(shape.head_dim // 2, dtype=torch.float32)
    return DecoderWeights(
        embedding=matrix(shape.vocab_size, hidden),
        layers=layers,
        final_norm=norm(hidden),
        output=None if shape.tied else matrix(shape.vocab_size, hidden),
        inverse_frequencies=10000.0 ** (-half / (shape.head_dim / 2)),
    )


def random_matrix(
    num_rows: int, num_columns: int, format: str, generator: torch.Generator
) -> StoredMatrix:
    """Weights of magnitude around 1 / sqrt(num_columns); quants and sub-scales over all bits."""
    size = num_columns**-0.5
    if format in DENSE_DTYPES:
        values = torch.randn(num_rows, num_columns, generator=generator) * size
        return StoredMatrix(num_rows, num_columns, format, values.to(DENSE_DTYPES[format]))
    weights_per_block, bytes_per_block = GGML_QUANT_SIZES[GGMLQuantizationType[format]]
    num_blocks = num_rows * num_columns // weights_per_block
    blocks = torch.randint(
        0, 256, (num_blocks, bytes_per_block), generator=generator, dtype=torch.uint8
    )
    for offset in HALVES[format]:
        blocks[:, offset : offset + 2] = torch.ones(num_blocks, 1).half().view(torch.uint8)
    spread = _dequantize(blocks, format).std() / size
    for offset in HALVES[format]:
        halves = (0.5 + torch.rand(num_blocks, 1, generator=generator)) / spread
        sign = torch.randint(0, 2, (num_blocks, 1), generator=generator) * 2 - 1
        blocks[:, offset : offset + 2] = (halves * sign).half().view(torch.uint8)
    return StoredMatrix(num_rows, num_columns, format, blocks.reshape(num_rows, -1))


def dense(matrix: StoredMatrix) -> torch.Tensor:
    """The exact float32 weights [num_rows, num_columns], by the decoders of the gguf package."""
    if matrix.format in DENSE_DTYPES:
        return matrix.data.float()
    return _dequantize(matrix.data, matrix.format)


def _dequantize(data: torch.Tensor, format: str) -> torch.Tensor:
    values = dequantize(data.numpy(), GGMLQuantizationType[format])
    return torch.from_numpy(values.astype(np.float32))
