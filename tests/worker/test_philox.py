"""Philox draws are the published function, and depend on seed, sequence and position alone."""

from __future__ import annotations

import numpy as np
import pytest

from worker_svc.philox import philox4x32, uniforms

# Random123, tests/kat_vectors, lines "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def _words(text: str) -> np.ndarray:
    return np.array([[int(word, 16) for word in text.split()]], dtype=np.uint32)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    np.testing.assert_array_equal(philox4x32(_words(counter), _words(key)), _words(expected))


def test_rows_are_independent_of_their_neighbours() -> None:
    seeds = np.array([7, 2**64 - 1, 0], dtype=np.uint64)
    sequences = np.array([0, 3, 1])
    positions = np.array([0, 5, 2**33])
    together = uniforms(seeds, sequences, positions)
    alone = [
        uniforms(seeds[i : i + 1], sequences[i : i + 1], positions[i : i + 1])[0] for i in range(3)
    ]
    np.testing.assert_array_equal(together, alone)


def test_seed_sequence_and_position_each_change_the_draw() -> None:
    """FIELD-FAILURES 1: choices of one request share a seed (identical texts)."""
    grid = np.array([(s, i, p) for s in (1, 2**32 + 1) for i in (0, 1) for p in (0, 1, 2**32)])
    drawn = uniforms(grid[:, 0].astype(np.uint64), grid[:, 1], grid[:, 2])
    assert len(set(drawn)) == len(grid)


def test_numbers_are_uniform_in_the_half_open_interval() -> None:
    n = 20000
    drawn = uniforms(np.full(n, 42, np.uint64), np.zeros(n, np.int64), np.arange(n))
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    counts = np.histogram(drawn, bins=20, range=(0, 1))[0]
    chi_square = ((counts - n / 20) ** 2 / (n / 20)).sum()
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001
