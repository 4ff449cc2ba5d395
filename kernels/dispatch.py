"""Which implementation of the kernels runs on which device."""

from __future__ import annotations

import torch

from kernels import reference, reference_logits
from kernels.interface import Kernels
from kernels.logits import LogitKernels


def select_kernels(device: torch.device) -> Kernels:
    """Triton's kernels on a CUDA device, the reference everywhere else."""
    if device.type == "cuda":
        # Triton is absent where torch is built for the CPU alone.
        from kernels import triton

        return triton
    return reference


def select_logit_kernels(device: torch.device) -> LogitKernels:
    """The same for what is done to logits."""
    if device.type == "cuda":
        from kernels import triton

        return triton
    return reference_logits
