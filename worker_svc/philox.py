"""Philox4x32-10: random numbers as a function of key and counter, without state.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, section
3.3; constants and known answers as in the authors' Random123. Because a draw depends on nothing but
(seed, sequence index, output position), a request draws the same numbers alone, in a batch, after a
preemption and on another worker.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
_NUM_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: U32, key: U32) -> U32:
    """The random block of each row.

    counter  [n, 4] uint32
    key      [n, 2] uint32
    Returns [n, 4] uint32.
    """
    words = [counter[:, i].copy() for i in range(4)]
    keys = [key[:, 0].copy(), key[:, 1].copy()]
    for _ in range(_NUM_ROUNDS):
        high0, low0 = _multiply(words[0], _MULTIPLIERS[0])
        high1, low1 = _multiply(words[2], _MULTIPLIERS[1])
        words = [high1 ^ words[1] ^ keys[0], low1, high0 ^ words[3] ^ keys[1], low0]
        keys = [keys[0] + _WEYL[0], keys[1] + _WEYL[1]]  # wraps modulo 2^32, as it should
    return np.stack(words, axis=1)


def uniforms(
    seeds: U64, sequence_indices: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each row [n]: a multiple of 2^-53, from two words of the block.

    Key = seed (low word, high word); counter = (position low, position high, sequence index, 0).
    """
    counter = np.zeros((len(seeds), 4), dtype=np.uint32)
    counter[:, 0], counter[:, 1] = _split(positions.astype(np.uint64))
    counter[:, 2] = sequence_indices
    key = np.stack(_split(seeds), axis=1)
    block = philox4x32(counter, key)
    high = (block[:, 0] >> np.uint32(5)).astype(np.float64)  # 27 bits
    low = (block[:, 1] >> np.uint32(6)).astype(np.float64)  # 26 bits
    return (high * 2.0**26 + low) * 2.0**-53


def _multiply(words: U32, multiplier: np.uint64) -> tuple[U32, U32]:
    """High and low words of the 64-bit products."""
    low, high = _split(words.astype(np.uint64) * multiplier)
    return high, low


def _split(values: U64) -> tuple[U32, U32]:
    """Low and high words."""
    return (values & _LOW).astype(np.uint32), (values >> _HALF).astype(np.uint32)
