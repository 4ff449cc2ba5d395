"""The likeliest token that a step finds by the way is the one that its logits show."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.decoder import NO_ROWS, DecoderWeights, StepLogits, StoredMatrix
from tests.kernels.cpu.paged_run import PagedRun, make_decoder, random_tokens
from tests.kernels.cpu.tiny_model import Shape, make_spec, make_weights

SHAPE = Shape(hidden_size=64, num_heads=2, num_kv_heads=1, head_dim=32, vocab_size=437, tied=False)
SPEC = make_spec(SHAPE)
NUM_TOKENS = 40


def random_weights() -> DecoderWeights:
    return make_weights(SHAPE, ("Q4_1", "Q8_0"), torch.Generator().manual_seed(8))


def with_output(weights: DecoderWeights, output: torch.Tensor) -> DecoderWeights:
    num_rows, num_columns = output.shape
    return replace(weights, output=StoredMatrix(num_rows, num_columns, "F32", output))


def step(
    weights: DecoderWeights,
    logit_rows: torch.Tensor = NO_ROWS,
    greedy_rows: torch.Tensor = NO_ROWS,
    num_threads: int = 2,
) -> StepLogits:
    decoder = make_decoder(SPEC, weights, "auto", num_threads=num_threads)
    tokens = random_tokens(SPEC, [NUM_TOKENS])
    run = PagedRun(decoder, SPEC, "auto", tokens)
    given = decoder.forward(
        tokens[0], run.batch([NUM_TOKENS]), run.kv_cache, logit_rows, greedy_rows
    )
    return StepLogits(given.logits.clone(), given.greedy)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_greedy_rows_take_the_largest_of_their_logits(num_threads: int) -> None:
    every_row = torch.arange(NUM_TOKENS)
    logits = step(random_weights(), every_row).logits
    greedy = step(random_weights(), greedy_rows=every_row, num_threads=num_threads).greedy
    assert greedy.is_sound.all() and not greedy.is_empty.any()
    assert greedy.token_ids.tolist() == logits.argmax(dim=-1).tolist()
    assert len(set(greedy.token_ids.tolist())) > 5


def test_rows_of_both_kinds_share_a_step() -> None:
    every_row = torch.arange(NUM_TOKENS)
    logits = step(random_weights(), every_row).logits
    both = step(random_weights(), every_row[::3], every_row[1::3])
    assert torch.equal(both.logits, logits[::3])
    assert both.greedy.token_ids.tolist() == logits[1::3].argmax(dim=-1).tolist()


def test_the_lowest_of_equal_tokens_wins() -> None:
    weights = replace(random_weights(), final_norm=torch.zeros(SHAPE.hidden_size))
    greedy = step(weights, greedy_rows=torch.arange(NUM_TOKENS)).greedy
    assert greedy.token_ids.tolist() == [0] * NUM_TOKENS


def test_places_beyond_the_vocabulary_never_win() -> None:
    """A panel is filled up with zeros, which are above these logits."""
    row = torch.tensor([5])
    output = torch.zeros(SHAPE.vocab_size, SHAPE.hidden_size)
    output[:, 0] = torch.linspace(2, 1, SHAPE.vocab_size)
    if step(with_output(random_weights(), output), row).logits.max() > 0:
        output = -output
    greedy = step(with_output(random_weights(), output), greedy_rows=row).greedy
    assert greedy.token_ids.tolist() == [SHAPE.vocab_size - 1]


def test_a_row_with_a_nan_is_not_sound() -> None:
    output = torch.randn(SHAPE.vocab_size, SHAPE.hidden_size)
    output[300] = torch.nan
    greedy = step(with_output(random_weights(), output), greedy_rows=torch.arange(3)).greedy
    assert greedy.token_ids.tolist() == [300] * 3
    assert not greedy.is_sound.any() and not greedy.is_empty.any()
