"""The kernels in Triton, for NVIDIA devices of compute capability 8.0 and later.

A package of functions; it satisfies `kernels.interface.Kernels` and `kernels.logits.LogitKernels`
as it stands.
"""

from kernels.triton.attention import paged_attention
from kernels.triton.block_copy import copy_blocks
from kernels.triton.kv_write import write_kv
from kernels.triton.logit_rules import apply_rules, mask_tokens
from kernels.triton.sampling import draw_tokens

__all__ = [
    "apply_rules",
    "copy_blocks",
    "draw_tokens",
    "mask_tokens",
    "paged_attention",
    "write_kv",
]
