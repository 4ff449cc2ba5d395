"""The sampler follows its rule exactly, draws the right distribution, and keeps rows apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import TypicalLogitsWarper

from kernels import reference_logits
from kernels.draw_row import typical_ids
from kernels.logits import Drawn
from shared.sampling import SamplingParams
from tests.kernels.draw_cases import CHI_SQUARE, FILTERED, PARAMS, SHARES, oracle
from worker_svc.philox import uniforms
from worker_svc.sampler import sample
from worker_svc.sampling_rows import SamplingRows


def rows_of(params: Sequence[SamplingParams], positions: Sequence[int]) -> SamplingRows:
    return SamplingRows(
        temperature=np.array([p.temperature for p in params], np.float32),
        top_k=np.array([p.top_k for p in params], np.int64),
        top_p=np.array([p.top_p for p in params], np.float32),
        min_p=np.array([p.min_p for p in params], np.float32),
        typical_p=np.array([p.typical_p for p in params], np.float32),
        seed=np.array([p.seed for p in params], np.uint64),
        sequence_index=np.zeros(len(params), np.int64),
        output_position=np.array(positions, np.int64),
    )


def draw(logits: torch.Tensor, rows: SamplingRows) -> Drawn:
    return sample(logits, rows, reference_logits)


def trials() -> Iterator[tuple[np.ndarray, SamplingRows, list[int]]]:
    """Logits, every kind of parameters, and the tokens that the rule gives."""
    generator = np.random.default_rng(11)
    for trial in range(20):
        logits = generator.normal(size=(len(PARAMS), 61)).astype(np.float32) * 2
        if trial % 2:
            logits = np.round(logits)  # many ties
        params = [replace(params, seed=trial * 100 + i) for i, params in enumerate(PARAMS)]
        rows = rows_of(params, [trial] * len(params))
        numbers = uniforms(rows.seed, rows.sequence_index, rows.output_position)
        yield logits, rows, [oracle(logits[i], p, numbers[i]) for i, p in enumerate(params)]


def test_each_row_equals_the_rule_written_out() -> None:
    for logits, rows, expected in trials():
        drawn = draw(torch.from_numpy(logits), rows)
        assert drawn.token_ids.tolist() == expected
        assert drawn.is_sound.all()


@pytest.mark.parametrize("name", FILTERED)
def test_drawn_frequencies_follow_the_probabilities_after_filters(name: str) -> None:
    """Chi-square over 2,000 draws of one row's distribution, at successive positions."""
    n = 2000
    params, left, power = FILTERED[name]
    logits = torch.from_numpy(np.tile(np.log(SHARES).astype(np.float32), (n, 1)))
    rows = rows_of([replace(params, seed=1234)] * n, range(n))
    token_ids = draw(logits, rows).token_ids
    counts = np.bincount(token_ids, minlength=len(SHARES))
    assert set(np.flatnonzero(counts)) == set(left)
    shares = SHARES[list(left)] ** power
    expected = n * shares / shares.sum()
    statistic = ((counts[list(left)] - expected) ** 2 / expected).sum()
    assert statistic < CHI_SQUARE[len(left) - 2]


def test_the_typical_filter_leaves_what_transformers_leaves() -> None:
    generator = np.random.default_rng(4)
    scores = torch.from_numpy(generator.normal(size=(8, 200)).astype(np.float32) * 2)
    shares = np.array([0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99], np.float32)
    weights = (scores.double() - scores.double().amax(dim=-1, keepdim=True)).exp()
    for row, typical_p in enumerate(shares.tolist()):
        warped = TypicalLogitsWarper(mass=typical_p)(torch.zeros(1, 1), scores[row][None])[0]
        left = warped.isfinite().nonzero()[:, 0].tolist()
        assert typical_ids(weights[row].numpy(), np.arange(200), typical_p).tolist() == left
        assert 0 < len(left) < 200


def test_a_row_does_not_change_with_its_neighbours() -> None:
    """FIELD-FAILURES 4: a seeded request changes with its neighbours."""
    generator = np.random.default_rng(5)
    logits = torch.from_numpy(generator.normal(size=(32, 5003)).astype(np.float32))
    params = [SamplingParams(0.9, top_p=0.95 if i % 2 else 1.0, seed=i) for i in range(32)]
    together = draw(logits, rows_of(params, range(32))).token_ids
    for i in (0, 7, 31):
        alone = draw(logits[i : i + 1], rows_of([params[i]], [i])).token_ids
        assert alone[0] == together[i]


def test_a_tiny_temperature_is_greedy_and_ties_go_to_the_lower_id() -> None:
    """FIELD-FAILURES 4: temperature 1e-6 is greedy; top_k 0 is off."""
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    assert draw(logits, rows_of([SamplingParams(temperature=1e-6)], [0])).token_ids[0] == 1
    one = [SamplingParams(temperature=1.0, top_k=1, seed=seed) for seed in range(50)]
    assert set(draw(logits.repeat(50, 1), rows_of(one, [0] * 50)).token_ids) == {1}
    off = [SamplingParams(temperature=10.0, top_k=0, seed=seed) for seed in range(50)]
    assert set(draw(logits.repeat(50, 1), rows_of(off, [0] * 50)).token_ids) == {0, 1, 2, 3}


@pytest.mark.parametrize("top_p", [1e-6, 0.0])
def test_the_smallest_nucleus_is_the_best_token(top_p: float) -> None:
    """FIELD-FAILURES 4: top_p 0, which the contract refuses, would be argmax."""
    logits = torch.tensor([[0.0, 2.0, 1.9]])
    params = [SamplingParams(temperature=1.0, top_p=top_p, seed=seed) for seed in range(20)]
    assert set(draw(logits.repeat(20, 1), rows_of(params, [0] * 20)).token_ids) == {1}


def test_min_p_one_leaves_the_best_tokens_alone() -> None:
    """FIELD-FAILURES 4: min_p 1 is argmax, as documented."""
    logits = torch.tensor([[0.0, 2.0, 2.0]])
    params = [SamplingParams(temperature=1.0, min_p=1.0, seed=seed) for seed in range(50)]
    assert set(draw(logits.repeat(50, 1), rows_of(params, [0] * 50)).token_ids) == {1, 2}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unsound_logits_fail_their_row_alone(value: float, temperature: float) -> None:
    logits = torch.zeros(3, 8)
    logits[:, 4] = 5.0
    logits[1, 2] = value
    params = [SamplingParams(temperature=temperature, top_k=1)] * 3
    drawn = draw(logits, rows_of(params, [0, 0, 0]))
    assert drawn.is_sound.tolist() == [True, False, True]
    assert drawn.token_ids[[0, 2]].tolist() == [4, 4]


def test_excluded_tokens_are_never_drawn() -> None:
    """A logit of minus infinity has weight zero, under every filter."""
    logits = torch.tensor([[float("-inf"), 1.0, float("-inf"), 0.5]])
    params = [SamplingParams(temperature=5.0, top_p=0.99, seed=seed) for seed in range(100)]
    assert set(draw(logits.repeat(100, 1), rows_of(params, [0] * 100)).token_ids) == {1, 3}
