"""A Llama-family GGUF file as decoder weights: views of its memory map, no second copy.

Only query and key rows are copied: the format stores them in the order that turns neighbouring
dimensions (2i, 2i + 1) together, and here dimension i turns with i + head_dim / 2.

    stored    x0 x4 x1 x5 x2 x6 x3 x7        one head of 8 rows
    wanted    x0 x1 x2 x3 x4 x5 x6 x7

Rows are whole runs of quantised blocks, so the move needs no decoding.
"""

from __future__ import annotations

import warnings

import numpy as np
import numpy.typing as npt
import torch

from kernels.decoder import DENSE_DTYPES, DecoderWeights, LayerWeights, StoredMatrix
from shared.errors import ModelLoadError
from shared.gguf_file import GgufFile, GgufTensor
from shared.model_spec import ModelSpec
from worker_svc.weights.rotary import inverse_frequencies

QUANTIZED_FORMATS = frozenset(
    ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
)


def load_gguf(spec: ModelSpec) -> DecoderWeights:
    """Raises ModelLoadError naming the tensor that is missing, misshapen or of another type."""
    reader = _Reader(GgufFile.open(spec.path))
    hidden = spec.hidden_size
    output = None
    if not spec.tie_word_embeddings:
        output = reader.matrix("output.weight", spec.vocab_size, hidden)
    return DecoderWeights(
        embedding=reader.matrix("token_embd.weight", spec.vocab_size, hidden),
        layers=[_layer(reader, spec, index) for index in range(spec.num_layers)],
        final_norm=reader.vector("output_norm.weight", hidden),
        output=output,
        inverse_frequencies=_frequencies(reader, spec),
        release_pages=reader.file.release_pages,
    )


def _layer(reader: _Reader, spec: ModelSpec, index: int) -> LayerWeights:
    hidden, intermediate = spec.hidden_size, spec.intermediate_size
    query_rows = spec.num_heads * spec.head_dim
    kv_rows = spec.num_kv_heads * spec.head_dim
    prefix = f"blk.{index}."
    query_bias = reader.optional_vector(prefix + "attn_q.bias", query_rows)
    key_bias = reader.optional_vector(prefix + "attn_k.bias", kv_rows)
    return LayerWeights(
        attention_norm=reader.vector(prefix + "attn_norm.weight", hidden),
        query=_in_halves(reader.matrix(prefix + "attn_q.weight", query_rows, hidden), spec),
        key=_in_halves(reader.matrix(prefix + "attn_k.weight", kv_rows, hidden), spec),
        value=reader.matrix(prefix + "attn_v.weight", kv_rows, hidden),
        attention_output=reader.matrix(prefix + "attn_output.weight", hidden, query_rows),
        mlp_norm=reader.vector(prefix + "ffn_norm.weight", hidden),
        gate=reader.matrix(prefix + "ffn_gate.weight", intermediate, hidden),
        up=reader.matrix(prefix + "ffn_up.weight", intermediate, hidden),
        down=reader.matrix(prefix + "ffn_down.weight", hidden, intermediate),
        query_bias=None if query_bias is None else rows_in_halves(query_bias, spec.head_dim),
        key_bias=None if key_bias is None else rows_in_halves(key_bias, spec.head_dim),
        value_bias=reader.optional_vector(prefix + "attn_v.bias", kv_rows),
        attention_output_bias=reader.optional_vector(prefix + "attn_output.bias", hidden),
        gate_bias=reader.optional_vector(prefix + "ffn_gate.bias", intermediate),
        up_bias=reader.optional_vector(prefix + "ffn_up.bias", intermediate),
        down_bias=reader.optional_vector(prefix + "ffn_down.bias", hidden),
    )


def rows_in_halves(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows [num_heads * head_dim, ...] from pairs of neighbours to half-rotated order; a copy."""
    by_pair = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return by_pair.transpose(1, 2).reshape(rows.shape)


def _in_halves(matrix: StoredMatrix, spec: ModelSpec) -> StoredMatrix:
    data = rows_in_halves(matrix.data, spec.head_dim)
    return StoredMatrix(matrix.num_rows, matrix.num_columns, matrix.format, data)


def _frequencies(reader: _Reader, spec: ModelSpec) -> torch.Tensor:
    """`rope_freqs.weight` divides each frequency: that is how Llama-3 scaling is stored."""
    frequencies = inverse_frequencies(spec)
    factors = reader.optional_vector("rope_freqs.weight", spec.head_dim // 2)
    return frequencies if factors is None else frequencies / factors


class _Reader:
    """Tensors of one file by name, checked against the shape that the model needs."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file

    def matrix(self, name: str, num_rows: int, num_columns: int) -> StoredMatrix:
        tensor = self._tensor(name, (num_rows, num_columns))
        data = self.file.tensor_bytes(name).reshape(num_rows, -1)
        if tensor.type_name in DENSE_DTYPES:
            dense = _view(data).view(DENSE_DTYPES[tensor.type_name])
            return StoredMatrix(num_rows, num_columns, tensor.type_name, dense)
        if tensor.type_name not in QUANTIZED_FORMATS:
            supported = ", ".join((*DENSE_DTYPES, *sorted(QUANTIZED_FORMATS)))
            raise ModelLoadError(
                f"{self.file.path}: tensor {name!r} is of type {tensor.type_name}, "
                f"which is not supported ({supported} are)"
            )
        return StoredMatrix(num_rows, num_columns, tensor.type_name, _view(data))

    def vector(self, name: str, size: int) -> torch.Tensor:
        """A vector as float32, with memory of its own."""
        tensor = self._tensor(name, (size,))
        dtype = DENSE_DTYPES.get(tensor.type_name)
        if dtype is None:
            raise ModelLoadError(
                f"{self.file.path}: the vector {name!r} is of type {tensor.type_name}"
            )
        return _view(self.file.tensor_bytes(name)).view(dtype).to(torch.float32, copy=True)

    def optional_vector(self, name: str, size: int) -> torch.Tensor | None:
        return self.vector(name, size) if name in self.file.tensors else None

    def _tensor(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        tensor = self.file.tensors.get(name)
        if tensor is None:
            raise ModelLoadError(f"{self.file.path} has no tensor {name!r}")
        if tensor.shape != shape:
            raise ModelLoadError(
                f"{self.file.path}: tensor {name!r} has the shape {tensor.shape}, not {shape}"
            )
        return tensor


def _view(data: npt.NDArray[np.uint8]) -> torch.Tensor:
    """A tensor over the same memory. The map is read-only, and nothing here writes to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(data)
