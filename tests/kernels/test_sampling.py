"""Triton's draws are the rule's, whatever the filters, the vocabulary and the company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import TypicalLogitsWarper

from kernels import reference_logits
from kernels import triton as kernels
from kernels.logits import Drawn, Draws
from kernels.triton import sampling
from shared.sampling import SamplingParams
from tests.kernels.conftest import INTERPRETED
from tests.kernels.draw_cases import (
    CHI_SQUARE,
    FILTERED,
    PARAMS,
    SHARES,
    draws_of,
    oracle,
)

LARGEST_NUMBER = 1 - 2**-53


def draw(logits: np.ndarray, draws: Draws, device: torch.device) -> Drawn:
    return kernels.draw_tokens(torch.from_numpy(logits).to(device), draws)


def take(draws: Draws, rows: Sequence[int]) -> Draws:
    picked = list(rows)
    return Draws(
        temperature=draws.temperature[picked],
        top_k=draws.top_k[picked],
        top_p=draws.top_p[picked],
        min_p=draws.min_p[picked],
        typical_p=draws.typical_p[picked],
        numbers=draws.numbers[picked],
    )


@pytest.mark.parametrize("kind", ["distinct", "ties", "excluded"])
@pytest.mark.parametrize("vocab_size", [61, 300])
def test_each_row_equals_the_rule_written_out(
    kind: str, vocab_size: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 tokens in five blocks, the last of which is not full."""
    monkeypatch.setattr(sampling, "MAX_BLOCK", 64)
    generator = np.random.default_rng(vocab_size)
    logits = generator.normal(size=(len(PARAMS), vocab_size)).astype(np.float32) * 2
    if kind == "ties":
        logits = np.round(logits)
        logits[logits == 1] = -0.0  # equal to 0, of other bits
    if kind == "excluded":
        logits[:, generator.permutation(vocab_size)[: vocab_size * 2 // 3]] = -np.inf
    numbers = generator.random(len(PARAMS))
    expected = [oracle(logits[i], p, numbers[i]) for i, p in enumerate(PARAMS)]
    drawn = draw(logits, draws_of(PARAMS, numbers), device)
    assert drawn.token_ids.tolist() == expected
    assert drawn.is_sound.all() and not drawn.is_empty.any()


def test_a_step_without_greedy_rows_launches_nothing_for_them(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a launch would wait for the device once more."""
    monkeypatch.setattr(sampling, "best_kernel", None)
    drawn = draw(np.zeros((0, 61), np.float32), Draws.greedy(0), device)
    assert len(drawn.token_ids) == len(drawn.is_sound) == len(drawn.is_empty) == 0


def test_a_large_vocabulary_draws_as_on_the_cpu(device: torch.device) -> None:
    generator = np.random.default_rng(7)
    logits = generator.normal(size=(len(PARAMS), 5003)).astype(np.float32) * 3
    draws = draws_of(PARAMS, generator.random(len(PARAMS)))
    expected = reference_logits.draw_tokens(torch.from_numpy(logits), draws)
    assert draw(logits, draws, device).token_ids.tolist() == expected.token_ids.tolist()


@pytest.mark.parametrize("vocab_size", [1, 2, 33])
def test_filters_at_their_ends(vocab_size: int, device: torch.device) -> None:
    ends = [
        SamplingParams(top_k=1),
        SamplingParams(top_k=vocab_size),
        SamplingParams(top_k=2**40),
        SamplingParams(top_p=0.0),
        SamplingParams(top_p=1e-6, typical_p=1e-6),
        SamplingParams(top_p=1 - 2**-24, temperature=0.01),
        SamplingParams(min_p=1.0, temperature=100.0),
        SamplingParams(typical_p=1 - 2**-24, temperature=1e4),
        SamplingParams(temperature=1e-5),
    ]
    generator = np.random.default_rng(vocab_size)
    logits = np.round(generator.normal(size=(len(ends), vocab_size)) * 2).astype(np.float32)
    for number in (0.0, LARGEST_NUMBER):
        draws = draws_of(ends, [number] * len(ends))
        expected = reference_logits.draw_tokens(torch.from_numpy(logits), draws)
        assert draw(logits, draws, device).token_ids.tolist() == expected.token_ids.tolist()


def test_the_largest_number_draws_the_last_token_and_one_is_refused(device: torch.device) -> None:
    logits = np.zeros((2, 5000), np.float32)
    logits[:, 0] = -0.3
    params = [SamplingParams(), SamplingParams(min_p=0.01)]
    drawn = draw(logits, draws_of(params, [LARGEST_NUMBER] * 2), device)
    assert drawn.token_ids.tolist() == [4999, 4999]
    with pytest.raises(AssertionError):
        draw(logits, draws_of(params, [0.5, 1.0]), device)


def test_both_zeros_rank_as_one(device: torch.device) -> None:
    logits = np.array([[-0.0, 0.0, -0.0]] * 2, np.float32)
    params = [SamplingParams(top_k=1), SamplingParams(top_k=2)]
    drawn = draw(logits, draws_of(params, [LARGEST_NUMBER] * 2), device)
    assert drawn.token_ids.tolist() == [0, 1]


def test_filters_by_rank_cut_equals_by_the_lower_id(device: torch.device) -> None:
    """A flat row is the worst case: every token is a candidate, and only ids tell them apart."""
    logits = np.full((4, 2500), -3.25, np.float32)
    cuts = [SamplingParams(top_k=700), SamplingParams(top_p=0.5)]
    params = [cuts[0], cuts[0], cuts[1], cuts[1]]
    drawn = draw(logits, draws_of(params, [0.0, LARGEST_NUMBER] * 2), device)
    assert drawn.token_ids.tolist() == [0, 699, 0, 1249]


def test_greedy_rows_take_the_lowest_of_the_best_ids(device: torch.device) -> None:
    logits = np.zeros((3, 5000), np.float32)
    logits[0, [4999, 4097, 4098]] = 2.0  # the first of a lane is not the first of all
    logits[1, 1] = -1.0
    logits[2] = -0.0
    logits[2, 3] = 0.0
    greedy = SamplingParams(temperature=0.0, top_k=3, top_p=0.5)
    assert draw(logits, draws_of([greedy] * 3, [0.9] * 3), device).token_ids.tolist() == [
        4097,
        0,
        0,
    ]


FREE, LIMITED = SamplingParams(), SamplingParams(top_k=5, top_p=0.9, min_p=0.1, typical_p=0.9)


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), FREE, LIMITED], ids=str)
def test_what_is_no_number_fails_its_row_alone(
    params: SamplingParams, device: torch.device
) -> None:
    logits = np.zeros((6, 40), np.float32)
    logits[:, 4] = 50.0
    logits[1, 39] = np.nan
    logits[2, 2] = np.inf
    logits[3] = -np.inf
    logits[4, 5:] = -np.inf
    drawn = draw(logits, draws_of([params] * 6, [0.5] * 6), device)
    expected = reference_logits.draw_tokens(
        torch.from_numpy(logits), draws_of([params] * 6, [0.5] * 6)
    )
    assert drawn.is_sound.tolist() == [True, False, False, False, True, True]
    assert drawn.is_empty.tolist() == [False, False, False, True, False, False]
    assert drawn.token_ids[drawn.is_sound].tolist() == [4, 4, 4]
    assert expected.is_sound.tolist() == drawn.is_sound.tolist()
    assert expected.is_empty.tolist() == drawn.is_empty.tolist()


def test_a_row_draws_the_same_in_any_company(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FIELD-FAILURES 4: a seeded request changes with its neighbours."""
    generator = np.random.default_rng(5)
    logits = generator.normal(size=(len(PARAMS), 400)).astype(np.float32)
    draws = draws_of(PARAMS, generator.random(len(PARAMS)))
    together = draw(logits, draws, device).token_ids
    backwards = list(reversed(range(len(PARAMS))))
    # Two rows of candidates in a launch, in blocks of another size.
    monkeypatch.setattr(sampling, "MAX_GATHERED_BYTES", 2 * 400 * 16)
    monkeypatch.setattr(sampling, "MAX_BLOCK", 128)
    again = draw(logits[backwards], take(draws, backwards), device).token_ids
    assert again[backwards].tolist() == together.tolist()
    for row in (3, 7, 10):
        alone = draw(logits[row : row + 1], take(draws, [row]), device)
        assert alone.token_ids[0] == together[row]


def test_logits_may_be_rows_of_a_larger_tensor(device: torch.device) -> None:
    generator = np.random.default_rng(6)
    wide = torch.from_numpy(generator.normal(size=(len(PARAMS), 90)).astype(np.float32)).to(device)
    draws = draws_of(PARAMS, generator.random(len(PARAMS)))
    apart = kernels.draw_tokens(wide[:, :70].contiguous(), draws)
    assert kernels.draw_tokens(wide[:, :70], draws).token_ids.tolist() == apart.token_ids.tolist()


NUM_STRATA = 20


@pytest.mark.parametrize("name", FILTERED)
def test_evenly_spread_numbers_draw_each_token_by_its_share(
    name: str, device: torch.device
) -> None:
    """Of n numbers in the middles of n equal parts of [0, 1), a token of share p takes n p to one
    more or less: closer than any random draws could tell."""
    params, left, power = FILTERED[name]
    numbers = (np.arange(NUM_STRATA) + 0.5) / NUM_STRATA
    logits = np.tile(np.log(SHARES).astype(np.float32), (NUM_STRATA, 1))
    drawn = draw(logits, draws_of([params] * NUM_STRATA, numbers), device)
    counts = np.bincount(drawn.token_ids, minlength=len(SHARES))
    shares = np.zeros(len(SHARES))
    shares[list(left)] = SHARES[list(left)] ** power
    assert (np.abs(counts - NUM_STRATA * shares / shares.sum()) < 1).all()


@pytest.mark.parametrize("name", ["none", "all"])
def test_drawn_frequencies_follow_the_probabilities_after_filters(
    name: str, device: torch.device
) -> None:
    """Chi-square over draws with seeded numbers: fewer where they are interpreted."""
    n = 2000 if not INTERPRETED else 300 if name == "none" else 60
    params, left, power = FILTERED[name]
    numbers = np.random.default_rng(1234).random(n)
    logits = np.tile(np.log(SHARES).astype(np.float32), (n, 1))
    token_ids = draw(logits, draws_of([params] * n, numbers), device).token_ids
    counts = np.bincount(token_ids, minlength=len(SHARES))
    assert set(np.flatnonzero(counts)) <= set(left)
    shares = SHARES[list(left)] ** power
    expected = n * shares / shares.sum()
    statistic = ((counts[list(left)] - expected) ** 2 / expected).sum()
    assert statistic < CHI_SQUARE[len(left) - 2]


def test_the_typical_filter_leaves_what_transformers_leaves(device: torch.device) -> None:
    """Whatever the number is, what it falls on is of their set, by their probabilities."""
    generator = np.random.default_rng(4)
    fractions = [0.1, 0.3, 0.5, 0.7, 0.9, 0.99]
    scores = generator.normal(size=(len(fractions), 200)).astype(np.float32) * 2
    for number in (0.01, 0.37, 0.62, 0.999):
        params = [replace(FREE, typical_p=fraction) for fraction in fractions]
        drawn = draw(scores, draws_of(params, [number] * len(params)), device)
        for row, fraction in enumerate(fractions):
            warper = TypicalLogitsWarper(mass=fraction)
            warped = warper(torch.zeros(1, 1), torch.from_numpy(scores[row : row + 1]))[0]
            running = warped.double().softmax(dim=-1).cumsum(dim=-1).numpy()
            assert drawn.token_ids[row] == np.searchsorted(running, number, side="right")
