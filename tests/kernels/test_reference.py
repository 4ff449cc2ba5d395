"""The reference itself, against attention written out one row and one head at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import reference
from kernels.dispatch import select_kernels
from kernels.interface import AttentionBatch, block_of, kv_row_size
from tests.kernels.cases import LAYER, Shape, make_case

CPU = torch.device("cpu")


@pytest.mark.parametrize("blocks_per_slab", [1, 3])
def test_attention_is_softmax_over_the_positions_up_to_the_row_s_own(blocks_per_slab: int) -> None:
    shape = Shape(6, 2, head_dim=32, block_size=8, blocks_per_slab=blocks_per_slab)
    lengths = [(9, 9), (20, 1), (16, 3), (1, 1)]
    case = make_case(shape, lengths, seed=1, device=CPU)
    output = reference.paged_attention(case.query, case.kv_cache, LAYER, case.batch, shape.scale)
    row = 0
    for i, (seq_len, num_new) in enumerate(lengths):
        for last in range(seq_len - num_new, seq_len):
            for head in range(6):
                key = case.keys[i][: last + 1, head // 3].double()
                value = case.values[i][: last + 1, head // 3].double()
                weights = torch.softmax(key @ case.query[row, head].double() * shape.scale, 0)
                expected = (weights @ value).float()
                torch.testing.assert_close(output[row, head], expected, rtol=1e-5, atol=1e-5)
            row += 1


def test_a_sequence_s_result_does_not_depend_on_its_neighbours() -> None:
    shape = Shape(num_heads=4, num_kv_heads=2, head_dim=64, block_size=16)
    together = make_case(shape, [(50, 1), (70, 30), (33, 33)], seed=2, device=CPU)
    arguments = (together.kv_cache, LAYER, together.batch, shape.scale)
    output = reference.paged_attention(together.query, *arguments)
    start = together.batch.query_start.tolist()
    for i in range(3):
        rows = slice(start[i], start[i + 1])
        alone = _only(together.batch, i)
        result = reference.paged_attention(
            together.query[rows], together.kv_cache, LAYER, alone, shape.scale
        )
        assert torch.equal(result, output[rows])


def test_write_puts_every_row_at_its_slot_and_nowhere_else() -> None:
    cache = torch.zeros(2, 2, 2, 2, 2, 8, 32)
    keys, values = torch.randn(2, 2, 2, 32, generator=torch.Generator().manual_seed(3))
    reference.write_kv(keys, values, cache, 1, torch.tensor([25, 4]))
    for row, (slab, place, offset) in enumerate([(1, 1, 1), (0, 0, 4)]):
        assert torch.equal(cache[slab, 1, :, place, 0, offset], keys[row])
        assert torch.equal(cache[slab, 1, :, place, 1, offset], values[row])
        cache[slab, 1, :, place, :, offset] = 0
    assert not cache.any()


def test_an_int8_cache_keeps_each_vector_within_half_a_step_of_its_scale() -> None:
    cache = torch.full((2, 2, 2, 2, 2, 8, kv_row_size(32, torch.int8)), -1, dtype=torch.int8)
    generator = torch.Generator().manual_seed(3)
    sizes = torch.tensor([1.0, 1e-3, 0.0, 40.0])[:, None, None]
    keys, values = torch.randn(2, 4, 2, 32, generator=generator) * sizes
    reference.write_kv(keys, values, cache, 1, torch.tensor([16, 17, 18, 19]))
    written = block_of(cache, 2)
    for kind, vectors in enumerate((keys, values)):
        rows = written[1, :, kind, :4].transpose(0, 1)
        scales = rows[..., 32:].contiguous().view(torch.float32)
        torch.testing.assert_close(scales, vectors.abs().amax(-1, keepdim=True) / 127)
        errors = (rows[..., :32].float() * scales - vectors).abs()
        assert (errors <= scales * 0.501).all()
    # Attention is that over what is kept.
    shape = Shape(num_heads=2, num_kv_heads=2, head_dim=32, block_size=8)
    kept = torch.zeros(2, 2, 2, 2, 2, 8, 32)
    block_of(kept, 2)[:] = written[..., :32] * written[..., 32:].contiguous().view(torch.float32)
    case = make_case(shape, [(4, 4)], seed=1, device=CPU)
    batch = replace(case.batch, block_tables=torch.tensor([[2]], dtype=torch.int32))
    outputs = [
        reference.paged_attention(case.query, each, 1, batch, shape.scale) for each in (cache, kept)
    ]
    assert torch.equal(*outputs)


def test_copy_moves_whole_blocks_between_caches_and_within_one() -> None:
    cache = torch.arange(4.0).view(2, 1, 1, 2, 1, 1, 1).repeat(1, 2, 1, 1, 2, 8, 32)
    reference.copy_blocks(cache, cache, torch.tensor([0, 2]), torch.tensor([3, 1]))
    assert [block_of(cache, block).unique().tolist() for block in range(4)] == [[0], [2], [2], [0]]
    other = torch.zeros(2, 2, 1, 1, 2, 8, 32)  # with one block a slab
    reference.copy_blocks(cache, other, torch.tensor([2]), torch.tensor([0]))
    assert [block_of(other, block).unique().tolist() for block in range(2)] == [[2], [0]]


def test_a_machine_without_cuda_gets_the_reference() -> None:
    assert select_kernels(CPU) is reference


def _only(batch: AttentionBatch, sequence: int) -> AttentionBatch:
    start, end = batch.query_start[sequence : sequence + 2].tolist()
    seq_len = int(batch.seq_lens[sequence])
    return AttentionBatch(
        query_start=torch.tensor([0, end - start], dtype=torch.int32),
        seq_lens=batch.seq_lens[sequence : sequence + 1],
        block_tables=batch.block_tables[sequence : sequence + 1],
        slots=batch.slots[start:end],
        positions=batch.positions[start:end],
        max_query_len=end - start,
        max_seq_len=seq_len,
    )
