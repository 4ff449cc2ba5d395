"""The native decoder against the oracle, in every format, over random shapes and chunkings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.cpu.build import detect_isa
from kernels.cpu.decoder import Compute
from tests.kernels.cpu.paged_run import KV_DTYPES, PagedRun, make_decoder, random_tokens
from tests.kernels.cpu.reference import reference_logits
from tests.kernels.cpu.tiny_model import FORMATS, Shape, make_spec, make_weights

TOLERANCES: dict[Compute, float] = {"float32": 1e-4, "auto": 1e-5}

SHAPES = {
    "one head": Shape(num_heads=1, num_kv_heads=1, head_dim=32, hidden_size=32),
    "many heads per KV head": Shape(num_heads=8, num_kv_heads=1, head_dim=32),
    "as many KV heads": Shape(num_heads=3, num_kv_heads=3, head_dim=96),
    "odd vectors": Shape(num_heads=4, num_kv_heads=1, head_dim=40, hidden_size=96),
    "wide heads": Shape(num_heads=2, num_kv_heads=1, head_dim=256, num_layers=1),
    "thirty queries per KV head": Shape(num_heads=30, num_kv_heads=1, head_dim=32, num_layers=1),
    "biases": Shape(biases=True),
    "untied": Shape(tied=False, vocab_size=101),
    "narrow": Shape(hidden_size=32, intermediate_size=160, head_dim=32),
}


def row_errors(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Root mean square error of each row, relative to all rows' size."""
    return (got.double() - wanted).pow(2).mean(1).sqrt() / wanted.pow(2).mean().sqrt()


def check(
    shape: Shape,
    formats: tuple[str, ...],
    compute: Compute,
    *,
    block_size: int = 16,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """Ragged sequences, chunk by chunk, against each sequence at once.

    In 8 bits the two sides' last bits put the odd activation on different sides of a rounding
    boundary, and what depends on it differs visibly. So "auto" is judged by most rows of short
    sequences in a single layer.
    """
    lengths = [19, 1, 45]
    if compute == "auto":
        shape = replace(shape, num_layers=1)
        lengths = [4, 1, 5, 2, 3, 4, 5, 3]
    spec = make_spec(shape)
    weights = make_weights(shape, formats, torch.Generator().manual_seed(1))
    sequences = random_tokens(spec, lengths)
    kv_dtype = kv_dtype or KV_DTYPES[compute]
    decoder = make_decoder(spec, weights, compute, block_size=block_size, kv_dtype=kv_dtype)
    run = PagedRun(decoder, spec, compute, sequences, block_size=block_size, kv_dtype=kv_dtype)
    logits = torch.cat(run.finish(chunk=7 if compute == "float32" else 3))
    emulate = compute == "auto"
    wanted = torch.cat(
        [reference_logits(spec, weights, s, emulate=emulate, kv_dtype=kv_dtype) for s in sequences]
    )
    errors = row_errors(logits, wanted)
    worst = errors.max() if compute == "float32" else errors.median()
    assert worst < TOLERANCES[compute]
    assert errors.max() < 0.1


@pytest.mark.parametrize("compute", ["float32", "auto"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_equals_the_oracle(format: str, compute: Compute) -> None:
    """Values in bfloat16, alone before a position, would lie on rounding boundaries of 8 bits."""
    check(Shape(), (format,), compute, kv_dtype=torch.float32)


@pytest.mark.parametrize("compute", ["float32", "auto"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_equals_the_oracle(name: str, compute: Compute) -> None:
    check(SHAPES[name], ("Q4_1", "Q8_0", "BF16", "Q4_0"), compute)


def test_dense_weights_may_have_any_number_of_columns() -> None:
    check(Shape(hidden_size=41, intermediate_size=75, head_dim=8), ("F32", "F16"), "float32")


@pytest.mark.parametrize("block_size", [8, 24, 64])
def test_every_block_size_equals_the_oracle(block_size: int) -> None:
    check(Shape(), ("Q4_1",), "float32", block_size=block_size)


@pytest.mark.parametrize("isa", sorted({"portable", detect_isa()}))
@pytest.mark.parametrize("block_size", [8, 24, 64])
@pytest.mark.parametrize("name", ["many heads per KV head", "odd vectors", "biases"])
def test_int8_keys_and_values_equal_the_oracle(name: str, block_size: int, isa: str) -> None:
    """In steps of the largest of a vector's 127 each; beside exact ones, within what these give."""
    shape = replace(SHAPES[name], num_layers=1)
    spec = make_spec(shape)
    weights = make_weights(shape, ("F32",), torch.Generator().manual_seed(6))
    sequences = random_tokens(spec, [19, 1, 45, 300])
    decoder = make_decoder(
        spec, weights, "float32", block_size=block_size, isa=isa, kv_dtype=torch.int8
    )
    run = PagedRun(decoder, spec, "float32", sequences, block_size=block_size, kv_dtype=torch.int8)
    logits = torch.cat(run.finish(chunk=7))
    rounded, exact = (
        torch.cat(
            [reference_logits(spec, weights, s, emulate=False, kv_dtype=dtype) for s in sequences]
        )
        for dtype in (torch.int8, torch.float32)
    )
    errors = row_errors(logits, rounded)
    assert errors.median() < TOLERANCES["float32"]
    assert errors.max() < 1e-2  # a number on the other side of a rounding boundary
    assert 1e-5 < row_errors(logits, exact).median() < 1e-2


def test_a_vector_that_is_not_finite_is_none_in_int8_either() -> None:
    shape = Shape(num_layers=1)
    spec = make_spec(shape)
    weights = make_weights(shape, ("F32",), torch.Generator().manual_seed(6))
    bias = torch.zeros(spec.num_kv_heads * spec.head_dim)
    bias[5] = torch.inf
    weights = replace(weights, layers=[replace(weights.layers[0], value_bias=bias)])
    decoder = make_decoder(spec, weights, "float32", kv_dtype=torch.int8)
    run = PagedRun(decoder, spec, "float32", random_tokens(spec, [9]), kv_dtype=torch.int8)
    assert run.step([9])[0].isnan().all()


@pytest.mark.parametrize("length", [255, 256, 257, 600])
def test_long_contexts_equal_the_oracle(length: int) -> None:
    """Attention goes in tiles of 256 positions; the last step stands alone, split over threads."""
    shape = Shape(num_layers=1)
    spec = make_spec(shape)
    weights = make_weights(shape, ("F32",), torch.Generator().manual_seed(2))
    tokens = random_tokens(spec, [length])
    run = PagedRun(make_decoder(spec, weights, "float32"), spec, "float32", tokens)
    logits = torch.cat([run.step([length - 1])[0], run.step([1])[0]])
    wanted = reference_logits(spec, weights, tokens[0], emulate=False)
    assert row_errors(logits, wanted).max() < TOLERANCES["float32"]
