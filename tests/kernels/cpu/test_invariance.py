"""Same sequence, same bits: whatever stands beside it, however it is chunked, on any threads."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.decoder import Compute
from tests.kernels.cpu.paged_run import PagedRun, make_decoder, random_tokens
from tests.kernels.cpu.tiny_model import Shape, make_spec, make_weights

SHAPE = Shape(hidden_size=64, intermediate_size=96, num_heads=3, num_kv_heads=1, head_dim=32)
SPEC = make_spec(SHAPE)
FORMATS = ("Q4_1", "Q8_0", "Q4_0", "F16", "Q5_1")
COMPUTES: tuple[Compute, ...] = ("float32", "auto")
LENGTH = 530  # three tiles of attention


def logits_of(
    compute: Compute, lengths: list[int], chunk: int, num_threads: int = 2
) -> list[torch.Tensor]:
    """The sequences' logits; the first is the same in all calls."""
    weights = make_weights(SHAPE, FORMATS, torch.Generator().manual_seed(3))
    decoder = make_decoder(SPEC, weights, compute, num_threads=num_threads)
    sequences = [random_tokens(SPEC, [n], seed=i)[0] for i, n in enumerate(lengths)]
    return PagedRun(decoder, SPEC, compute, sequences, seed=len(lengths)).finish(chunk)


@pytest.fixture(scope="module", params=COMPUTES)
def alone(request: pytest.FixtureRequest) -> tuple[Compute, torch.Tensor]:
    return request.param, logits_of(request.param, [LENGTH], chunk=1, num_threads=1)[0]


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 16, 512])
def test_chunks_and_threads(
    alone: tuple[Compute, torch.Tensor], chunk: int, num_threads: int
) -> None:
    compute, wanted = alone
    assert torch.equal(logits_of(compute, [LENGTH], chunk, num_threads)[0], wanted)


@pytest.mark.parametrize("chunk", [1, 16, 61])
def test_among_31_others(alone: tuple[Compute, torch.Tensor], chunk: int) -> None:
    compute, wanted = alone
    lengths = [LENGTH, *(1 + 37 * i % 90 for i in range(31))]
    assert torch.equal(logits_of(compute, lengths, chunk)[0], wanted)
