"""The parameters of rows that draw, as one tensor: one copy to the device.

parameters  # [m, NUM_PARAMETERS] float64, which holds each value of `Draws` exactly
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl

from kernels.logits import Draws, Ids

ROW, TEMPERATURE, TOP_K, TOP_P, MIN_P, TYPICAL_P, NUMBER = (tl.constexpr(i) for i in range(7))
NUM_PARAMETERS = tl.constexpr(7)


def pack(draws: Draws, rows: Ids, device: torch.device) -> torch.Tensor:
    """[m, NUM_PARAMETERS] Those of `rows` [m], in this order."""
    columns: list[npt.NDArray[np.generic]] = [
        rows,
        draws.temperature[rows],
        draws.top_k[rows],
        draws.top_p[rows],
        draws.min_p[rows],
        draws.typical_p[rows],
        draws.numbers[rows],
    ]
    packed = np.stack([column.astype(np.float64) for column in columns], axis=1)
    return torch.from_numpy(packed).to(device)
