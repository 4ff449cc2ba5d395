"""Triton's KV write and block copy equal the reference, bit by bit, and touch nothing else."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels import triton as kernels
from kernels.triton.block_copy import runs

CACHES = [
    ((5, 2, 3, 1, 2, 16, 64), torch.float32),
    ((5, 2, 1, 1, 2, 8, 80), torch.bfloat16),
    ((3, 2, 5, 1, 2, 32, 256), torch.float16),
]


def random_cache(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


@pytest.mark.parametrize(("shape", "dtype"), CACHES, ids=str)
def test_write_equals_the_reference(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    num_blocks, _, num_kv_heads, _, _, block_size, head_dim = shape
    num_slots = num_blocks * block_size
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(5))[:7].to(device)
    # As views into one fused projection. The interpreter cuts float32 to bfloat16 unrounded, so
    # float16 alone stands for a cache of another type.
    fused_dtype = torch.float32 if dtype == torch.float16 else dtype
    fused = random_cache((7, 2 * num_kv_heads + 1, head_dim), fused_dtype, device)
    keys, values = fused[:, :num_kv_heads], fused[:, num_kv_heads : 2 * num_kv_heads]
    written, expected = (random_cache(shape, dtype, device) for _ in range(2))
    kernels.write_kv(keys, values, written, 1, slots)
    reference.write_kv(keys, values, expected, 1, slots)
    assert torch.equal(written, expected)


@pytest.mark.parametrize(("shape", "dtype"), CACHES, ids=str)
def test_copy_equals_the_reference_within_a_cache_and_between_two(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    sources, targets = torch.tensor([2, 0]), torch.tensor([1, 0])
    copied, expected = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
    source = random_cache(shape, dtype, device)
    kernels.copy_blocks(source, copied, sources, targets)
    reference.copy_blocks(source, expected, sources, targets)
    assert torch.equal(copied, expected)

    kernels.copy_blocks(source, source, torch.tensor([0]), torch.tensor([2]))
    assert torch.equal(source[2], source[0])


def test_nothing_to_write_or_copy_is_no_launch(device: torch.device) -> None:
    cache = random_cache((2, 1, 1, 1, 2, 8, 32), torch.float32, device)
    before = cache.clone()
    nothing = torch.empty(0, dtype=torch.int64)
    rows = torch.empty(0, 1, 32, device=device)
    kernels.copy_blocks(cache, cache, nothing, nothing)
    kernels.write_kv(rows, rows, cache, 0, nothing.to(device))
    assert torch.equal(cache, before)


def test_blocks_that_ascend_together_are_one_run() -> None:
    sources, targets = torch.tensor([4, 5, 6, 8, 9, 2]), torch.tensor([0, 1, 2, 3, 5, 6])
    assert runs(sources, targets) == [(4, 0, 3), (8, 3, 1), (9, 5, 1), (2, 6, 1)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_blocks_swap_out_to_the_host_and_back() -> None:
    device = torch.device("cuda")
    cache = random_cache((4, 2, 2, 1, 2, 16, 64), torch.bfloat16, device)
    before = cache.clone()
    host = torch.zeros((2, 2, 2, 1, 2, 16, 64), dtype=torch.bfloat16, pin_memory=True)
    kernels.copy_blocks(cache, host, torch.tensor([3, 1]), torch.tensor([0, 1]))
    cache.zero_()
    kernels.copy_blocks(host, cache, torch.tensor([0, 1]), torch.tensor([3, 1]))
    torch.cuda.synchronize()
    assert torch.equal(cache[3], before[3]) and torch.equal(cache[1], before[1])
