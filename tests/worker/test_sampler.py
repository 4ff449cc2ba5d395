"""The sampler follows its rule exactly, draws the right distribution, and keeps rows apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import TypicalLogitsWarper

from shared.sampling import SamplingParams
from worker_svc import draw_batch
from worker_svc.draw_row import typical_ids
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
    if params.typical_p < 1.0:
        kept = typical_of(weights, sorted(kept), float(np.float32(params.typical_p)))
    running = np.cumsum([weights[token] for token in sorted(kept)])
    return sorted(kept)[int(np.searchsorted(running, number * running[-1], side="right"))]


def typical_of(weights: np.ndarray, kept: list[int], typical_p: float) -> list[int]:
    share = weights[kept] / weights[kept].sum()
    entropy = -(share * np.log(share)).sum()
    distance = np.abs(-np.log(share) - entropy)
    order = np.argsort(distance, kind="stable")
    last = int((np.cumsum(share[order]) >= typical_p).argmax())
    return [
        token for token, far in zip(kept, distance, strict=True) if far <= distance[order[last]]
    ]


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.9),
    SamplingParams(temperature=2.0, top_p=0.999),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=0.9, top_k=7, top_p=0.8, min_p=0.05),
    SamplingParams(temperature=1.0, top_k=10**6, top_p=0.5),
    SamplingParams(temperature=1.0, typical_p=0.5),
    SamplingParams(temperature=1.4, typical_p=0.97),
    SamplingParams(temperature=1.2, top_k=30, top_p=0.95, min_p=0.01, typical_p=0.8),
]


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


SHARES = np.array([0.05, 0.3, 0.02, 0.2, 0.13, 0.1, 0.2], np.float64)
"""Of seven tokens; two are equal."""
FILTERED: dict[str, tuple[SamplingParams, Sequence[int], float]] = {
    "none": (SamplingParams(), range(7), 1.0),
    "temperature": (SamplingParams(temperature=0.5), range(7), 2.0),
    "heat": (SamplingParams(temperature=4.0), range(7), 0.25),
    "top_k": (SamplingParams(top_k=3), [1, 3, 6], 1.0),
    "top_k cuts equals": (SamplingParams(top_k=2), [1, 3], 1.0),
    "top_p": (SamplingParams(top_p=0.75), [1, 3, 6, 4], 1.0),
    "min_p": (SamplingParams(min_p=0.3), [1, 3, 6, 4, 5], 1.0),
    # Surprise 1.2, 1.6, 1.6, 2.0, 2.3, 3.0, 3.9 at an entropy of 1.74.
    "typical_p": (SamplingParams(typical_p=0.5), [3, 6, 4], 1.0),
    "all": (
        SamplingParams(temperature=0.5, top_k=6, top_p=0.98, min_p=0.1, typical_p=0.5),
        [1, 3, 6],
        2.0,
    ),
}
"""Parameters, the tokens that they leave, and the power of their shares."""
CHI_SQUARE = (10.8, 13.8, 16.3, 18.5, 20.5, 22.5)
"""By degrees of freedom, 1 to 6: p = 0.001."""


@pytest.mark.parametrize("name", FILTERED)
@pytest.mark.parametrize("kind", ["rows by themselves", "rows in one launch"])
def test_drawn_frequencies_follow_the_probabilities_after_filters(name: str, kind: str) -> None:
    """Chi-square over 2,000 draws of one row's distribution, at successive positions."""
    n = 2000
    params, left, power = FILTERED[name]
    logits = torch.from_numpy(np.tile(np.log(SHARES).astype(np.float32), (n, 1)))
    rows = rows_of([replace(params, seed=1234)] * n, range(n))
    if kind == "rows by themselves":
        token_ids = sample(logits, rows).token_ids
    else:
        numbers = uniforms(rows.seed, rows.sequence_index, rows.output_position)
        token_ids = draw_batch.draw_batch(logits, np.arange(n), rows, numbers)
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
    batch = weights.clone()
    draw_batch.keep_typical(batch, shares)
    for row, typical_p in enumerate(shares.tolist()):
        warped = TypicalLogitsWarper(mass=typical_p)(torch.zeros(1, 1), scores[row][None])[0]
        left = warped.isfinite().nonzero()[:, 0].tolist()
        assert typical_ids(weights[row].numpy(), np.arange(200), typical_p).tolist() == left
        assert batch[row].nonzero()[:, 0].tolist() == left
        assert 0 < len(left) < 200


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
    """FIELD-FAILURES 4: top_p 0, which the contract refuses, would be argmax."""
    logits = torch.tensor([[0.0, 2.0, 1.9]])
    params = [SamplingParams(temperature=1.0, top_p=top_p, seed=seed) for seed in range(20)]
    assert set(sample(logits.repeat(20, 1), rows_of(params, [0] * 20)).token_ids) == {1}


def test_min_p_one_leaves_the_best_tokens_alone() -> None:
    """FIELD-FAILURES 4: min_p 1 is argmax, as documented."""
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
