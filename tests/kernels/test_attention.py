"""Triton's attention equals the reference over ragged batches of every kind."""

from __future__ import annotations

import random

import pytest
import torch

from kernels import reference
from kernels import triton as kernels
from kernels.interface import AttentionBatch
from kernels.triton import attention
from tests.kernels.cases import LAYER, Case, Shape, make_case, random_lengths

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCE = {FP32: 2e-5, FP16: 4e-3, BF16: 3e-2}

SHAPES = [
    Shape(6, 2, 64, 16),
    Shape(8, 1, 32, 8, BF16, BF16),
    Shape(2, 2, 80, 8, FP16, FP16),
    Shape(5, 1, 128, 32, BF16, BF16),
    Shape(3, 1, 256, 16, FP16, FP16),
    Shape(7, 1, 128, 32),
    Shape(4, 1, 64, 24, FP32, BF16),
    Shape(2, 1, 96, 16, BF16, FP32),
]
"""Groups of 1 to 8, every head size and block size, every type and mixtures."""


def check(shape: Shape, case: Case) -> None:
    output = kernels.paged_attention(case.query, case.kv_cache, LAYER, case.batch, shape.scale)
    expected = reference.paged_attention(case.query, case.kv_cache, LAYER, case.batch, shape.scale)
    limit = TOLERANCE[shape.query_dtype]
    torch.testing.assert_close(output, expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ragged_batches_equal_the_reference(shape: Shape, device: torch.device) -> None:
    for seed in range(2):
        lengths = random_lengths(random.Random(seed), num_seqs=3, longest=70)
        print("seed", seed, "lengths", lengths)
        check(shape, make_case(shape, lengths, seed, device))


def test_every_length_around_the_tiles_and_blocks(device: torch.device) -> None:
    """The field's off-by-one: a context that just fills, or just misses, a block or a tile."""
    shape = Shape(2, 1, 32, 8, FP16, FP16)
    edges = [1, 2, 7, 8, 9, 16, 31, 32, 33, 63, 64, 65]
    check(shape, make_case(shape, [(length, 1) for length in edges], 3, device))
    check(shape, make_case(shape, [(length, (length + 1) // 2) for length in edges], 4, device))
    check(shape, make_case(shape, [(length, length) for length in edges], 5, device))


def test_a_context_of_several_splits_merges(device: torch.device) -> None:
    shape = Shape(3, 1, 64, 32)
    check(shape, make_case(shape, [(256, 1), (257, 1), (300, 1), (3, 1)], 5, device))


def test_a_context_beyond_the_most_splits_takes_longer_runs(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "max_splits", lambda num_kv_heads: 2)
    shape = Shape(2, 1, 32, 32)
    check(shape, make_case(shape, [(700, 1), (512, 1), (20, 1)], 6, device))


def test_a_row_has_the_same_bits_in_any_company(device: torch.device) -> None:
    """The field's report: a request changes with its neighbours. Kernels alone may not cause it."""
    shape = Shape(3, 1, 64, 16, BF16, BF16)
    case = make_case(shape, [(300, 1), (40, 9), (70, 70)], 7, device)
    arguments = (LAYER, case.batch, shape.scale)
    together = kernels.paged_attention(case.query, case.kv_cache, *arguments)
    starts = case.batch.query_start.tolist()
    for i in range(3):
        rows = slice(starts[i], starts[i + 1])
        alone = AttentionBatch(
            query_start=torch.tensor([0, rows.stop - rows.start]).int().to(device),
            seq_lens=case.batch.seq_lens[i : i + 1],
            block_tables=case.batch.block_tables[i : i + 1],
            slots=case.batch.slots[rows],
            positions=case.batch.positions[rows],
            max_query_len=rows.stop - rows.start,
            max_seq_len=int(case.batch.seq_lens[i]),
        )
        result = kernels.paged_attention(case.query[rows], case.kv_cache, LAYER, alone, shape.scale)
        assert torch.equal(result, together[rows]), f"sequence {i}"


def test_the_query_may_be_a_view_into_a_fused_projection(device: torch.device) -> None:
    shape = Shape(4, 2, 64, 16)
    case = make_case(shape, [(20, 1), (30, 5)], 8, device)
    fused = torch.randn(6, 8, 64, device=device)
    fused[:, :4] = case.query
    arguments = (case.kv_cache, LAYER, case.batch, shape.scale)
    assert torch.equal(
        kernels.paged_attention(fused[:, :4], *arguments),
        kernels.paged_attention(case.query, *arguments),
    )
