"""Which implementation of the kernels runs on which device."""

from __future__ import annotations

import torch

from kernels import reference
from kernels.interface import Kernels


def select_kernels(device: torch.device) -> Kernels:
    """Triton's kernels on a CUDA device, the reference everywhere else."""
    if device.type == "cuda":
        # Triton is absent where torch is built for the CPU alone.
        from kernels import triton

        return triton
    return reference
