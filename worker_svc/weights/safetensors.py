"""A transformers folder of safetensors, one file or several, as decoder weights.

Tensors are views of the files' memory maps where nothing is to be converted.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kernels.decoder import DENSE_DTYPES, DecoderWeights, LayerWeights, StoredMatrix
from shared.errors import ModelLoadError
from shared.model_files import weight_files
from shared.model_spec import ModelSpec
from worker_svc.weights.rotary import inverse_frequencies

_FORMATS = {dtype: name for name, dtype in DENSE_DTYPES.items()}


def load_safetensors(spec: ModelSpec) -> DecoderWeights:
    """Raises ModelLoadError naming the tensor that is missing, misshapen or of another type."""
    reader = _Reader(spec.path)
    hidden = spec.hidden_size
    output = None
    if not spec.tie_word_embeddings:
        output = reader.matrix("lm_head.weight", spec.vocab_size, hidden)
    return DecoderWeights(
        embedding=reader.matrix("model.embed_tokens.weight", spec.vocab_size, hidden),
        layers=[_layer(reader, spec, index) for index in range(spec.num_layers)],
        final_norm=reader.vector("model.norm.weight", hidden),
        output=output,
        inverse_frequencies=inverse_frequencies(spec),
    )


def _layer(reader: _Reader, spec: ModelSpec, index: int) -> LayerWeights:
    hidden, intermediate = spec.hidden_size, spec.intermediate_size
    query_rows = spec.num_heads * spec.head_dim
    kv_rows = spec.num_kv_heads * spec.head_dim
    prefix = f"model.layers.{index}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    return LayerWeights(
        attention_norm=reader.vector(prefix + "input_layernorm.weight", hidden),
        query=reader.matrix(attention + "q_proj.weight", query_rows, hidden),
        key=reader.matrix(attention + "k_proj.weight", kv_rows, hidden),
        value=reader.matrix(attention + "v_proj.weight", kv_rows, hidden),
        attention_output=reader.matrix(attention + "o_proj.weight", hidden, query_rows),
        mlp_norm=reader.vector(prefix + "post_attention_layernorm.weight", hidden),
        gate=reader.matrix(mlp + "gate_proj.weight", intermediate, hidden),
        up=reader.matrix(mlp + "up_proj.weight", intermediate, hidden),
        down=reader.matrix(mlp + "down_proj.weight", hidden, intermediate),
        query_bias=reader.optional_vector(attention + "q_proj.bias", query_rows),
        key_bias=reader.optional_vector(attention + "k_proj.bias", kv_rows),
        value_bias=reader.optional_vector(attention + "v_proj.bias", kv_rows),
        attention_output_bias=reader.optional_vector(attention + "o_proj.bias", hidden),
        gate_bias=reader.optional_vector(mlp + "gate_proj.bias", intermediate),
        up_bias=reader.optional_vector(mlp + "up_proj.bias", intermediate),
        down_bias=reader.optional_vector(mlp + "down_proj.bias", hidden),
    )


class _Reader:
    """Tensors of one folder by name, checked against the shape that the model needs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, torch.Tensor] = {}
        for path in weight_files(folder):
            try:
                with safe_open(path, framework="pt") as file:
                    self.tensors.update((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
            except (OSError, SafetensorError) as error:
                raise ModelLoadError(f"cannot read {path}: {error}") from error

    def matrix(self, name: str, num_rows: int, num_columns: int) -> StoredMatrix:
        tensor = self._tensor(name, (num_rows, num_columns))
        return StoredMatrix(num_rows, num_columns, _FORMATS[tensor.dtype], tensor)

    def vector(self, name: str, size: int) -> torch.Tensor:
        """A vector as float32."""
        return self._tensor(name, (size,)).to(torch.float32)

    def optional_vector(self, name: str, size: int) -> torch.Tensor | None:
        return self.vector(name, size) if name in self.tensors else None

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelLoadError(f"{self.folder} has no tensor {name!r}")
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"{self.folder}: tensor {name!r} has the shape {tuple(tensor.shape)}, not {shape}"
            )
        if tensor.dtype not in _FORMATS:
            raise ModelLoadError(
                f"{self.folder}: tensor {name!r} is of type {tensor.dtype}, which is not "
                f"supported ({', '.join(DENSE_DTYPES)} are)"
            )
        return tensor
