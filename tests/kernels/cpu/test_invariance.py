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
Kinds = tuple[Compute, torch.dtype | None]  # arithmetic, KV cache (None: its own)
KINDS: tuple[Kinds, ...] = (
    ("float32", None),
    ("auto", None),
    ("auto", torch.int8),
)
LENGTH = 530  # three tiles of attention


def logits_of(
    kinds: Kinds, lengths: list[int], chunk: int, num_threads: int = 2
) -> list[torch.Tensor]:
    """The sequences' logits; the first is the same in all calls."""
    compute, kv_dtype = kinds
    weights = make_weights(SHAPE, FORMATS, torch.Generator().manual_seed(3))
    decoder = make_decoder(SPEC, weights, compute, num_threads=num_threads, kv_dtype=kv_dtype)
    sequences = [random_tokens(SPEC, [n], seed=i)[0] for i, n in enumerate(lengths)]
    seed = len(lengths)
    run = PagedRun(decoder, SPEC, compute, sequences, seed=seed, kv_dtype=kv_dtype)
    return run.finish(chunk)


@pytest.fixture(scope="module", params=KINDS, ids=str)
def alone(request: pytest.FixtureRequest) -> tuple[Kinds, torch.Tensor]:
    return request.param, logits_of(request.param, [LENGTH], chunk=1, num_threads=1)[0]


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 16, 512])
def test_chunks_and_threads(
    alone: tuple[Kinds, torch.Tensor], chunk: int, num_threads: int
) -> None:
    kinds, wanted = alone
    assert torch.equal(logits_of(kinds, [LENGTH], chunk, num_threads)[0], wanted)


@pytest.mark.parametrize("chunk", [1, 16, 61])
def test_among_31_others(alone: tuple[Kinds, torch.Tensor], chunk: int) -> None:
    kinds, wanted = alone
    lengths = [LENGTH, *(1 + 37 * i % 90 for i in range(31))]
    assert torch.equal(logits_of(kinds, lengths, chunk)[0], wanted)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_rows_whose_logits_are_wanted_alone(
    alone: tuple[Kinds, torch.Tensor], num_threads: int
) -> None:
    """In any order, or none of a step's: the last layer then leaves out the other rows."""
    (compute, kv_dtype), first = alone
    lengths = [LENGTH, 40, 7]
    wanted = logits_of((compute, kv_dtype), lengths, chunk=512)
    assert torch.equal(wanted[0], first)
    weights = make_weights(SHAPE, FORMATS, torch.Generator().manual_seed(3))
    decoder = make_decoder(SPEC, weights, compute, num_threads=num_threads, kv_dtype=kv_dtype)
    sequences = [random_tokens(SPEC, [n], seed=i)[0] for i, n in enumerate(lengths)]
    run = PagedRun(decoder, SPEC, compute, sequences, seed=7, kv_dtype=kv_dtype)
    for step in range(10):
        done = run.num_computed
        num_new = [min(61, n - d) for n, d in zip(lengths, done, strict=True)]
        parts = [slice(d, d + new) for d, new in zip(done, num_new, strict=True)]
        every = torch.cat([logits[part] for logits, part in zip(wanted, parts, strict=True)])
        rows = torch.arange(len(every)).flip(0)
        with_logits, greedy = (rows[3::5], rows[:2]) if step % 3 else (rows[:0], rows[:0])
        token_ids = torch.cat([s[part] for s, part in zip(sequences, parts, strict=True)])
        got = decoder.forward(token_ids, run.batch(num_new), run.kv_cache, with_logits, greedy)
        assert torch.equal(got.logits, every[with_logits])
        assert got.greedy.token_ids.tolist() == every[greedy].argmax(dim=1).tolist()
        run.num_computed = [d + new for d, new in zip(done, num_new, strict=True)]
        if run.num_computed == lengths:
            return
    raise AssertionError("the sequences did not end")
