"""The sampler follows its rule exactly, draws the right distribution, and keeps rows apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from shared.sampling import SamplingParams
from worker_svc import draw_batch
from worker_svc.philox import uniforms
from worker_svc.sampler import sample
from worker_svc.sampling_rows import SamplingRows


def rows_of(params: Sequence[SamplingParams], positions: Sequence[int]) -> SamplingRows:
    return SamplingRows(
        temperature=np.array([p.temperature for p in params], np.float32),
        top_k=np.array([p.top_k for p in params], np.int64),
        top_p=np.array([p.top_p for p in params], np.float32),
        min_p=np.array([p.min_p for p in params], np.float32),
        seed=np.array([p.seed for p in params], np.uint64),
        sequence_index=np.zeros(len(params), np.int64),
        output_position=np.array(positions, np.int64),
    )


def oracle(logits: np.ndarray, params: SamplingParams, number: float) -> int:
    """The rule as written, with a full sort: slow and plain."""
    scores = logits.astype(np.float64)
    if params.is_greedy:
        return int(scores.argmax())
    weights = np.exp((scores - scores.max()) / float(np.float32(params.temperature)))
    ranked = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if params.top_k:
        ranked = ranked[: params.top_k]
    if params.top_p < 1.0:
        share = float(np.float32(params.top_p)) * weights[ranked].sum()
        reached = np.cumsum(weights[ranked]) >= share
        ranked = ranked[: int(reached.argmax()) + 1]
    kept = [token for token in ranked if weights[token] >= float(np.float32(params.min_p))]
    running = np.cumsum([weights[token] for token in sorted(kept)])
    return sorted(kept)[int(np.searchsorted(running, number * running[-1], side="right"))]


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.9),
    SamplingParams(temperature=2.0, top_p=0.999),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=0.9, top_k=7, top_p=0.8, min_p=0.05),
    SamplingParams(temperature=1.0, top_k=10**6, top_p=0.5),
]


def trials() -> Iterator[tuple[np.ndarray, SamplingRows, list[int]]]:
    """Logits, every kind of parameters, and the tokens that the rule gives."""
    generator = np.random.default_rng(11)
    for trial in range(20):
        logits = generator.normal(size=(len(PARAMS), 61)).astype(np.float32) * 2
        if trial % 2:
            logits = np.round(logits)  # many ties
        params = [
            SamplingParams(p.temperature, p.top_k, p.top_p, p.min_p, seed=trial * 100 + i)
            for i, p in enumerate(PARAMS)
        ]
        rows = rows_of(params, [trial] * len(params))
        numbers = uniforms(rows.seed, rows.sequence_index, rows.output_position)
        yield logits, rows, [oracle(logits[i], p, numbers[i]) for i, p in enumerate(params)]


def test_each_row_equals_the_rule_written_out() -> None:
    for logits, rows, expected in trials():
        drawn = sample(torch.from_numpy(logits), rows)
        assert drawn.token_ids.tolist() == expected
        assert drawn.is_sound.all()


@pytest.mark.parametrize("rows_per_launch", [3, 64])
@pytest.mark.parametrize("first_candidates", [2, 1024])
def test_rows_in_one_launch_equal_the_rule_written_out(
    monkeypatch: pytest.MonkeyPatch, rows_per_launch: int, first_candidates: int
) -> None:
    """What GPUs run: exact for any number of rows together and of candidates."""
    monkeypatch.setattr(draw_batch, "FIRST_CANDIDATES", first_candidates)
    monkeypatch.setattr(draw_batch, "ROWS_PER_LAUNCH", rows_per_launch)
    chosen = np.array([i for i, p in enumerate(PARAMS) if not p.is_greedy])
    for logits, rows, expected in trials():
        numbers = uniforms(rows.seed, rows.sequence_index, rows.output_position)[chosen]
        scores = torch.from_numpy(logits)
        drawn = draw_batch.draw_batch(scores, chosen, rows.take(chosen), numbers)
        assert drawn.tolist() == [expected[i] for i in chosen]


def test_drawn_frequencies_follow_the_probabilities() -> None:
    """Chi-square over 4,000 draws of one row's distribution, at successive positions."""
    n = 4000
    logits = np.log(np.array([0.4, 0.25, 0.2, 0.1, 0.05], np.float32))
    params = [SamplingParams(temperature=1.0, seed=1234)] * n
    drawn = sample(torch.from_numpy(np.tile(logits, (n, 1))), rows_of(params, range(n)))
    counts = np.bincount(drawn.token_ids, minlength=5)
    expected = n * np.exp(logits)
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # 4 degrees, p = 0.001


def test_a_row_does_not_change_with_its_neighbours() -> None:
    """FIELD-FAILURES 4: a seeded request changes with its neighbours."""
    generator = np.random.default_rng(5)
    logits = torch.from_numpy(generator.normal(size=(32, 5003)).astype(np.float32))
    params = [SamplingParams(0.9, top_p=0.95 if i % 2 else 1.0, seed=i) for i in range(32)]
    together = sample(logits, rows_of(params, range(32))).token_ids
    for i in (0, 7, 31):
        alone = sample(logits[i : i + 1], rows_of([params[i]], [i])).token_ids
        assert alone[0] == together[i]


def test_a_tiny_temperature_is_greedy_and_ties_go_to_the_lower_id() -> None:
    """FIELD-FAILURES 4: temperature 1e-6 is greedy; top_k 0 is off."""
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    assert sample(logits, rows_of([SamplingParams(temperature=1e-6)], [0])).token_ids[0] == 1
    one = [SamplingParams(temperature=1.0, top_k=1, seed=seed) for seed in range(50)]
    assert set(sample(logits.repeat(50, 1), rows_of(one, [0] * 50)).token_ids) == {1}
    off = [SamplingParams(temperature=10.0, top_k=0, seed=seed) for seed in range(50)]
    assert set(sample(logits.repeat(50, 1), rows_of(off, [0] * 50)).token_ids) == {0, 1, 2, 3}


@pytest.mark.parametrize("top_p", [1e-6, 0.0])
def test_the_smallest_nucleus_is_the_best_token(top_p: float) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.9]])
    params = [SamplingParams(temperature=1.0, top_p=top_p, seed=seed) for seed in range(20)]
    assert set(sample(logits.repeat(20, 1), rows_of(params, [0] * 20)).token_ids) == {1}


def test_min_p_one_leaves_the_best_tokens_alone() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0]])
    params = [SamplingParams(temperature=1.0, min_p=1.0, seed=seed) for seed in range(50)]
    assert set(sample(logits.repeat(50, 1), rows_of(params, [0] * 50)).token_ids) == {1, 2}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unsound_logits_fail_their_row_alone(value: float, temperature: float) -> None:
    logits = torch.zeros(3, 8)
    logits[:, 4] = 5.0
    logits[1, 2] = value
    params = [SamplingParams(temperature=temperature, top_k=1)] * 3
    drawn = sample(logits, rows_of(params, [0, 0, 0]))
    assert drawn.is_sound.tolist() == [True, False, True]
    assert drawn.token_ids[[0, 2]].tolist() == [4, 4]


def test_excluded_tokens_are_never_drawn() -> None:
    """A logit of minus infinity has weight zero, under every filter."""
    logits = torch.tensor([[float("-inf"), 1.0, float("-inf"), 0.5]])
    params = [SamplingParams(temperature=5.0, top_p=0.99, seed=seed) for seed in range(100)]
    assert set(sample(logits.repeat(100, 1), rows_of(params, [0] * 100)).token_ids) == {1, 3}
