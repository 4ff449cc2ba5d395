"""The Llama family in torch operations over `kernels.interface.Kernels`, on any device.

Per layer: x += Wo attention(rope(Wq n), rope(Wk n), Wv n), n = norm(x)
           x += Wdown (silu(Wgate n) * Wup n),              n = norm(x)

Implements `kernels.decoder.Decoder`. On the CPU it is the fallback of the native decoder.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from kernels.decoder import NO_ROWS, DecoderWeights, LayerWeights, StepLogits
from kernels.interface import AttentionBatch, Kernels
from kernels.logits import Draws, LogitKernels
from shared.model_spec import ModelSpec
from worker_svc.models.layers import Linear, linear, rms_norm, rotary_tables, rotate
from worker_svc.weights.dequantize import dense_matrix


class LlamaDecoder:
    """Weights in one `dtype` on one device, and the step over them."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        kernels: Kernels,
        logit_kernels: LogitKernels,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[float], None],
    ) -> None:
        """Calls `progress` with the loaded fraction, 0 to 1, after each layer."""
        self._eps = spec.rms_norm_eps
        self._logit_kernels = logit_kernels
        self._embedding = dense_matrix(weights.embedding, dtype, device)
        self._layers: list[_Layer] = []
        for index, layer in enumerate(weights.layers):
            self._layers.append(_Layer(spec, index, layer, kernels, dtype, device))
            progress((index + 1) / (spec.num_layers + 1))
        self._final_norm = weights.final_norm.to(device=device, dtype=dtype)
        self._output = self._embedding
        if weights.output is not None:
            self._output = dense_matrix(weights.output, dtype, device)
        self._inverse_frequencies = weights.inverse_frequencies.to(device)
        progress(1.0)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        kv_cache: torch.Tensor,
        logit_rows: torch.Tensor,
        greedy_rows: torch.Tensor = NO_ROWS,
    ) -> StepLogits:
        """See `kernels.decoder.Decoder.forward`."""
        x = functional.embedding(token_ids, self._embedding)
        cosines, sines = rotary_tables(batch.positions, self._inverse_frequencies, x.dtype)
        for layer in self._layers:
            x = layer.forward(x, batch, kv_cache, cosines, sines)
        ends = x[torch.cat((logit_rows, greedy_rows))]
        logits = linear(rms_norm(ends, self._final_norm, self._eps), self._output).float()
        num_logits, num_greedy = len(logit_rows), len(greedy_rows)
        greedy = self._logit_kernels.draw_tokens(logits[num_logits:], Draws.greedy(num_greedy))
        return StepLogits(logits[:num_logits], greedy)


class _Layer:
    """Attention and feed-forward of one layer."""

    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        weights: LayerWeights,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        w = weights
        self._spec = spec
        self._index = index
        self._kernels = kernels
        self._attention_norm = w.attention_norm.to(device=device, dtype=dtype)
        self._query_key_value = Linear(
            (w.query, w.key, w.value), (w.query_bias, w.key_bias, w.value_bias), dtype, device
        )
        self._attention_output = Linear(
            (w.attention_output,), (w.attention_output_bias,), dtype, device
        )
        self._mlp_norm = w.mlp_norm.to(device=device, dtype=dtype)
        self._gate_up = Linear((w.gate, w.up), (w.gate_bias, w.up_bias), dtype, device)
        self._down = Linear((w.down,), (w.down_bias,), dtype, device)

    def forward(
        self,
        x: torch.Tensor,
        batch: AttentionBatch,
        kv_cache: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
    ) -> torch.Tensor:
        """x [num_tokens, hidden_size] to the next layer's x; stores keys and values."""
        normed = rms_norm(x, self._attention_norm, self._spec.rms_norm_eps)
        x = x + self._attention(normed, batch, kv_cache, cosines, sines)
        normed = rms_norm(x, self._mlp_norm, self._spec.rms_norm_eps)
        gate, up = self._gate_up(normed).chunk(2, dim=-1)
        return x + self._down(functional.silu(gate) * up)

    def _attention(
        self,
        normed: torch.Tensor,
        batch: AttentionBatch,
        kv_cache: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
    ) -> torch.Tensor:
        spec = self._spec
        heads = self._query_key_value(normed).view(normed.shape[0], -1, spec.head_dim)
        first_value = spec.num_heads + spec.num_kv_heads
        query = rotate(heads[:, : spec.num_heads], cosines, sines)
        key = rotate(heads[:, spec.num_heads : first_value], cosines, sines)
        value = heads[:, first_value:]
        self._kernels.write_kv(key, value, kv_cache, self._index, batch.slots)
        attended = self._kernels.paged_attention(
            query, kv_cache, self._index, batch, spec.head_dim**-0.5
        )
        return self._attention_output(attended.flatten(1))
