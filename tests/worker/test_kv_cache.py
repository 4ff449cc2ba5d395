"""Where the blocks of the pools lie, and what moves between them."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels.interface import block_of
from shared.errors import ProtocolError
from shared.plan import CacheOp, CacheOpKind
from tests.kernels.cpu.tiny_model import Shape, make_spec
from worker_svc import kv_cache
from worker_svc.kv_cache import KvCache, block_bytes

BLOCK_SIZE = 16
SPEC = make_spec(Shape())
DTYPES = [torch.float32, torch.bfloat16, torch.int8]


def new_cache(num_blocks: int, num_host_blocks: int, dtype: torch.dtype) -> KvCache:
    return KvCache(
        SPEC,
        block_size=BLOCK_SIZE,
        num_device_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        dtype=dtype,
        device=torch.device("cpu"),
        kernels=reference,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_and_head_has_the_blocks_of_a_slab_as_one_stream(dtype: torch.dtype) -> None:
    pool = new_cache(1000, 0, dtype).device_blocks
    stream = pool[0, -1, -1]
    assert stream.is_contiguous()
    assert 0.9 * kv_cache.STREAM_BYTES <= stream.nbytes <= kv_cache.STREAM_BYTES


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_take_memory_slab_by_slab(dtype: torch.dtype) -> None:
    """So the first token takes that of one slab, however large the pool."""
    pool = new_cache(1000, 0, dtype).device_blocks
    slab_bytes = pool.nbytes // len(pool)
    for number in (0, 1, 499, 999):
        block = block_of(pool, number)
        start = block.data_ptr() - pool.data_ptr()
        extent = sum(
            (n - 1) * stride for n, stride in zip(block.shape, block.stride(), strict=True)
        )
        last = start + extent * block.element_size()
        assert start // slab_bytes == last // slab_bytes == number // pool.shape[3]


@pytest.mark.parametrize("num_blocks", [1, 31, 33, 1000])
def test_slabs_hold_the_blocks_and_fewer_spare_ones_than_slabs(num_blocks: int) -> None:
    pool = new_cache(num_blocks, 0, torch.float32).device_blocks
    spare_bytes = pool.nbytes - num_blocks * block_bytes(SPEC, BLOCK_SIZE, torch.float32)
    assert 0 <= spare_bytes < len(pool) * block_bytes(SPEC, BLOCK_SIZE, torch.float32)


def test_blocks_go_to_the_host_and_elsewhere_back(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = SPEC.num_layers * SPEC.num_kv_heads
    per_head = block_bytes(SPEC, BLOCK_SIZE, torch.float32) // heads
    monkeypatch.setattr(kv_cache, "STREAM_BYTES", 4 * per_head)
    cache = new_cache(11, 4, torch.float32)
    pool = cache.device_blocks
    assert pool.shape[:4] == (3, SPEC.num_layers, SPEC.num_kv_heads, 4)
    pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(6)))
    before = pool.clone()
    cache.run(
        [
            CacheOp(1, CacheOpKind.SWAP_OUT, [3, 4, 10], [1, 3, 0]),
            CacheOp(2, CacheOpKind.SWAP_IN, [0, 1, 3], [5, 0, 8]),
            CacheOp(3, CacheOpKind.COPY, [9], [2]),
        ]
    )
    moved = {5: 10, 0: 3, 8: 4, 2: 9}
    for block in range(12):
        assert torch.equal(block_of(pool, block), block_of(before, moved.get(block, block)))


def test_a_block_that_only_fills_the_last_slab_is_not_there() -> None:
    cache = new_cache(33, 40, torch.float32)
    assert cache.device_blocks.shape[0] * cache.device_blocks.shape[3] == 34
    for kind, source, target in (
        (CacheOpKind.SWAP_OUT, 33, 0),
        (CacheOpKind.SWAP_IN, 0, 33),
        (CacheOpKind.COPY, 0, 33),
    ):
        with pytest.raises(ProtocolError):
            cache.run([CacheOp(1, kind, [source], [target])])
