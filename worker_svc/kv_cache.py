"""The pools of KV blocks, on the device and on the host, and the moves between their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from kernels.interface import Kernels, block_of, kv_row_size
from shared.errors import ProtocolError
from shared.model_spec import ModelSpec
from shared.plan import CacheOp, CacheOpKind

ALIGNMENT_BYTES = 64  # a cache line
STREAM_BYTES = 256 << 10
"""What the blocks of a slab on the CPU have side by side for a layer and head. The first token
takes the memory of a slab. Beside one slab for all, attention over long contexts takes 2 % longer
with this much, 4 % with half of it."""


def pool_shape(
    spec: ModelSpec,
    block_size: int,
    dtype: torch.dtype,
    num_blocks: int,
    blocks_per_slab: int = 1,
) -> tuple[int, ...]:
    """[num_slabs, num_layers, num_kv_heads, blocks_per_slab, 2, block_size, row_size], see
    `kernels.interface`; as many slabs as `num_blocks` take."""
    num_slabs = -(-num_blocks // blocks_per_slab)
    row_size = kv_row_size(spec.head_dim, dtype)
    heads = (spec.num_layers, spec.num_kv_heads)
    return (num_slabs, *heads, blocks_per_slab, 2, block_size, row_size)


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return prod(pool_shape(spec, block_size, dtype, 1)) * dtype.itemsize


def stream_blocks(spec: ModelSpec, block_size: int, dtype: torch.dtype, num_blocks: int) -> int:
    """Blocks of a slab on the CPU for a pool of `num_blocks`: of STREAM_BYTES at most, and so that
    all slabs are as full as can be."""
    bytes_of_head = 2 * block_size * kv_row_size(spec.head_dim, dtype) * dtype.itemsize
    num_slabs = -(-num_blocks // max(1, STREAM_BYTES // bytes_of_head))
    return -(-num_blocks // num_slabs)


class KvCache:
    """`device_blocks` and `host_blocks`, each a KV cache as in `kernels.interface` that starts as
    zeros. The device's last slab may have blocks beyond `num_device_blocks`, which nobody uses."""

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
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self._kernels = kernels
        host_shape = pool_shape(spec, block_size, dtype, num_host_blocks)
        if device.type == "cpu":
            per_slab = stream_blocks(spec, block_size, dtype, num_device_blocks)
            shape = pool_shape(spec, block_size, dtype, num_device_blocks, per_slab)
            self.device_blocks = _lazy_zeros(shape, dtype)
            self.host_blocks = _lazy_zeros(host_shape, dtype)
        else:
            shape = pool_shape(spec, block_size, dtype, num_device_blocks)
            self.device_blocks = torch.zeros(shape, dtype=dtype, device=device)
            self.host_blocks = torch.zeros(host_shape, dtype=dtype, pin_memory=True)

    def run(self, ops: Sequence[CacheOp]) -> None:
        """Move blocks, op by op. Raises ProtocolError for a block that is not there."""
        device = (self.device_blocks, self.num_device_blocks)
        host = (self.host_blocks, self.num_host_blocks)
        for op in ops:
            (source, num_source), (target, num_target) = {
                CacheOpKind.SWAP_OUT: (device, host),
                CacheOpKind.SWAP_IN: (host, device),
                CacheOpKind.COPY: (device, device),
            }[op.kind]
            _check(op, num_source, num_target)
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
            block_of(target, to_block).copy_(block_of(source, from_block), non_blocking=True)


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


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose memory the system gives when it is first written."""
    num_bytes = prod(shape) * dtype.itemsize
    raw = np.zeros(num_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    return torch.from_numpy(raw[start : start + num_bytes]).view(dtype).view(shape)
