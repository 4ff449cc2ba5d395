"""The kernels in Triton, for NVIDIA devices of compute capability 8.0 and later.

A package of functions; it satisfies `kernels.interface.Kernels` as it stands.
"""

from kernels.triton.attention import paged_attention
from kernels.triton.block_copy import copy_blocks
from kernels.triton.kv_write import write_kv

__all__ = ["copy_blocks", "paged_attention", "write_kv"]
