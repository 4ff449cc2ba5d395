"""The pools of KV blocks, on the device and on the host, and the moves between their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from kernels.interface import BLOCK_MAJOR, HEAD_MAJOR, Kernels, kv_row_size
from shared.errors import ProtocolError
from shared.model_spec import ModelSpec
from shared.plan import CacheOp, CacheOpKind

ALIGNMENT_BYTES = 64  # a cache line


def block_shape(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> tuple[int, ...]:
    """[num_layers, 2, num_kv_heads, block_size, row_size], see `kernels.interface`."""
    row_size = kv_row_size(spec.head_dim, dtype)
    return (spec.num_layers, 2, spec.num_kv_heads, block_size, row_size)


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return prod(block_shape(spec, block_size, dtype)) * dtype.itemsize


class KvCache:
    """`device_blocks` and `host_blocks`, each [n, *block_shape]; starts as zeros."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        block_size: int,
        num_device_blocks: int,
        num_host_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
    ) -> None:
        shape = block_shape(spec, block_size, dtype)
        self._kernels = kernels
        if device.type == "cpu":
            self.device_blocks = _lazy_zeros((num_device_blocks, *shape), dtype, HEAD_MAJOR)
            self.host_blocks = _lazy_zeros((num_host_blocks, *shape), dtype, BLOCK_MAJOR)
        else:
            self.device_blocks = torch.zeros(num_device_blocks, *shape, dtype=dtype, device=device)
            self.host_blocks = torch.zeros(num_host_blocks, *shape, dtype=dtype, pin_memory=True)

    def run(self, ops: Sequence[CacheOp]) -> None:
        """Move blocks, op by op. Raises ProtocolError for a block that is not there."""
        for op in ops:
            source, target = {
                CacheOpKind.SWAP_OUT: (self.device_blocks, self.host_blocks),
                CacheOpKind.SWAP_IN: (self.host_blocks, self.device_blocks),
                CacheOpKind.COPY: (self.device_blocks, self.device_blocks),
            }[op.kind]
            _check(op, len(source), len(target))
            self._copy(source, target, op.source_blocks, op.target_blocks)

    def _copy(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        source_blocks: Sequence[int],
        target_blocks: Sequence[int],
    ) -> None:
        if source.device == target.device:
            from_blocks = torch.tensor(source_blocks, dtype=torch.int64)
            to_blocks = torch.tensor(target_blocks, dtype=torch.int64)
            self._kernels.copy_blocks(source, target, from_blocks, to_blocks)
            return
        # A block is one contiguous run of bytes: one transfer each, in stream order.
        for from_block, to_block in zip(source_blocks, target_blocks, strict=True):
            target[to_block].copy_(source[from_block], non_blocking=True)


def _check(op: CacheOp, num_source: int, num_target: int) -> None:
    """Blocks exist, no block is written twice, and a copy reads none that it writes."""
    sources, targets = set(op.source_blocks), set(op.target_blocks)
    is_sound = (
        all(0 <= block < num_source for block in sources)
        and all(0 <= block < num_target for block in targets)
        and len(targets) == len(op.target_blocks)
        and (op.kind is not CacheOpKind.COPY or not sources & targets)
    )
    if not is_sound:
        raise ProtocolError(
            f"cache operation {op.id} ({op.kind.name}) moves blocks {list(op.source_blocks)} to "
            f"{list(op.target_blocks)}, of pools of {num_source} and {num_target}"
        )


def _lazy_zeros(
    shape: tuple[int, ...], dtype: torch.dtype, memory_order: tuple[int, ...]
) -> torch.Tensor:
    """Zeros whose memory the system gives when it is first written."""
    num_bytes = prod(shape) * dtype.itemsize
    raw = np.zeros(num_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    numbers = torch.from_numpy(raw[start : start + num_bytes]).view(dtype)
    strides = torch.empty_permuted(shape, memory_order, dtype=dtype, device="meta").stride()
    return numbers.as_strided(shape, strides)
