"""Makes dense tensors of stored matrices."""

from __future__ import annotations

import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as dequantize_blocks

from kernels.decoder import DENSE_DTYPES, StoredMatrix

ROWS_AT_A_TIME = 4096
"""Bounds the float32 temporaries of a large embedding."""


def dense_matrix(matrix: StoredMatrix, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The matrix's values, [num_rows, num_columns] of `dtype` on `device`.

    Shares memory with `matrix` when nothing is to be converted. Rounds to `dtype` once: block
    formats are decoded in float32.
    """
    if matrix.format in DENSE_DTYPES:
        return matrix.data.to(device=device, dtype=dtype)
    block_type = GGMLQuantizationType[matrix.format]
    dense = torch.empty(matrix.num_rows, matrix.num_columns, dtype=dtype, device=device)
    for start in range(0, matrix.num_rows, ROWS_AT_A_TIME):
        rows = slice(start, start + ROWS_AT_A_TIME)
        values = dequantize_blocks(matrix.data[rows].numpy(), block_type)
        dense[rows] = torch.from_numpy(values).to(device=device, dtype=dtype)
    return dense
