"""Layers that models share, over plain tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from kernels.decoder import StoredMatrix
from worker_svc.weights.dequantize import dense_matrix

CPU_ROW_TILE = 16
"""Rows of one matrix product on the CPU. The library sums in an order that depends on the number
of rows, so there every product has this one shape, and a row's result depends on no other row."""


class Linear:
    """y = x W^T + b, with the rows of several stored matrices stacked into one W."""

    def __init__(
        self,
        matrices: Sequence[StoredMatrix],
        biases: Sequence[torch.Tensor | None],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        dense = [dense_matrix(matrix, dtype, device) for matrix in matrices]
        self.weight = dense[0] if len(dense) == 1 else torch.cat(dense)
        self.bias: torch.Tensor | None = None
        if any(bias is not None for bias in biases):
            pairs = zip(matrices, biases, strict=True)
            whole = [torch.zeros(m.num_rows) if b is None else b for m, b in pairs]
            self.bias = torch.cat(whole).to(device=device, dtype=dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, num_columns] -> [num_tokens, num_rows]."""
        y = linear(x, self.weight)
        return y if self.bias is None else y + self.bias


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [num_tokens, num_columns] times weight [num_rows, num_columns] transposed."""
    if x.device.type != "cpu":
        return functional.linear(x, weight)
    num_tokens = x.shape[0]
    padded = functional.pad(x, (0, 0, 0, -num_tokens % CPU_ROW_TILE))
    y = x.new_empty(padded.shape[0], weight.shape[0])
    for start in range(0, num_tokens, CPU_ROW_TILE):
        tile = slice(start, start + CPU_ROW_TILE)
        torch.mm(padded[tile], weight.T, out=y[tile])
    return y[:num_tokens]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Zhang and Sennrich 2019, in float32; the result is rounded to x's type before the gain.

    x [num_tokens, hidden_size], weight [hidden_size] in x's type.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def rotary_tables(
    positions: torch.Tensor, inverse_frequencies: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of each row's angles, [num_tokens, 1, head_dim / 2]; angles in float32."""
    angles = positions.float()[:, None] * inverse_frequencies
    return angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Turns dimension i of each head with i + head_dim / 2; x [num_tokens, heads, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
