"""The oracle: a whole sequence at once in plain torch, without a cache, in float64.

With `emulate`, it does what the native decoder documents for quantised weights: activations are
rounded to 8 bits per row and block of 32. Keys and values are rounded to `kv_dtype`, to 8 bits per
position and head if that is int8.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.decoder import DENSE_DTYPES, DecoderWeights, LayerWeights, StoredMatrix
from shared.model_spec import ModelSpec
from tests.kernels.cpu.tiny_model import dense


def reference_logits(
    spec: ModelSpec,
    weights: DecoderWeights,
    token_ids: torch.Tensor,
    *,
    emulate: bool,
    kv_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Logits [num_tokens, vocab_size] of one sequence."""
    x = dense(weights.embedding)[token_ids].double()
    positions = torch.arange(len(token_ids), dtype=torch.float32)
    angles = (positions[:, None] * weights.inverse_frequencies).double()
    for layer in weights.layers:
        normed = _norm(x, layer.attention_norm, spec)
        attended = _attention(spec, layer, normed, angles, emulate, kv_dtype)
        x = x + _linear(attended, layer.attention_output, layer.attention_output_bias, emulate)
        normed = _norm(x, layer.mlp_norm, spec)
        gate = _linear(normed, layer.gate, layer.gate_bias, emulate)
        up = _linear(normed, layer.up, layer.up_bias, emulate)
        x = x + _linear(functional.silu(gate) * up, layer.down, layer.down_bias, emulate)
    output = weights.output or weights.embedding
    return _linear(_norm(x, weights.final_norm, spec), output, None, emulate)


def _attention(
    spec: ModelSpec,
    layer: LayerWeights,
    normed: torch.Tensor,
    angles: torch.Tensor,
    emulate: bool,
    kv_dtype: torch.dtype,
) -> torch.Tensor:
    def heads(matrix: StoredMatrix, bias: torch.Tensor | None) -> torch.Tensor:
        return _linear(normed, matrix, bias, emulate).unflatten(1, (-1, spec.head_dim))

    query = _rotate(heads(layer.query, layer.query_bias), angles)
    key = _rotate(heads(layer.key, layer.key_bias), angles)
    value = heads(layer.value, layer.value_bias)
    if kv_dtype == torch.int8:
        key, value = (_in_8_bits(x, _scale(x, spec.head_dim)) for x in (key, value))
    elif kv_dtype == torch.bfloat16:
        key, value = key.bfloat16().double(), value.bfloat16().double()
    group = spec.num_heads // spec.num_kv_heads
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    out = functional.scaled_dot_product_attention(
        query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), is_causal=True
    )
    return out.transpose(0, 1).flatten(1)


def _rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    cosines, sines = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)


def _norm(x: torch.Tensor, weight: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + spec.rms_norm_eps) * weight.double()


def _linear(
    x: torch.Tensor, matrix: StoredMatrix, bias: torch.Tensor | None, emulate: bool
) -> torch.Tensor:
    if emulate and matrix.format not in DENSE_DTYPES:
        x = _in_8_bits(x, _power_of_two(_scale(x, 32)))
    y = x @ dense(matrix).double().T
    return y if bias is None else y + bias.double()


def _scale(x: torch.Tensor, block: int) -> torch.Tensor:
    """Of blocks of a row: their largest magnitude / 127."""
    return (x.unflatten(-1, (-1, block)).abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)


def _power_of_two(scale: torch.Tensor) -> torch.Tensor:
    return scale.log2().ceil().exp2()


def _in_8_bits(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    blocks = x.unflatten(-1, (scale.shape[-2], -1))
    return ((blocks / scale).round() * scale).flatten(-2)
