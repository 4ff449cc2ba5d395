"""How large the attention kernels' tiles are, and why.

Shared memory is the tightest budget: 163 KiB for one program on sm_80, 227 KiB on sm_90. What a
program holds there:

    query tile             num_rows x padded_dim, read once
    key and value tiles    num_keys x padded_dim each, twice: one in use, one on its way

A key tile of 16-bit elements is at most 16 KiB, so keys and values take 64 KiB. Decode is bound
by memory: by Little's law an H100 (3.35 TB/s, 132 multiprocessors, about 0.7 us of latency) needs
18 KiB on their way to each multiprocessor, an A100 11 KiB. One decode program has 32 KiB on its
way and holds 71 KiB, so two fit on a multiprocessor of sm_80 and three on sm_90.

Five stages, because the addresses of keys and values are themselves loaded, from the block table:
Triton's pipeliner gives half of the stages beyond the first to each level of such a chain, and
with fewer than five keeps one buffer, so that copies and products take turns.

Registers are the other budget. Prefill multiplies 128 rows by 8 warps at 128 dimensions (220 of
255 registers on sm_80, 180 on sm_90, nothing spilled; 64 rows by 4 warps spill there), 64 rows by
4 warps below and by 8 warps above. Both are whole warp-group products of sm_90 (64 rows by 4
warps). Decode's 16 rows are the smallest tile of the tensor cores. Float32 is multiplied without
tensor cores, exactness before speed, and keeps its operands in registers: hence fewer rows.
"""

from __future__ import annotations

from dataclasses import dataclass

_KEY_TILE_BYTES = 16 * 1024
_KEY_TILE_BYTES_FLOAT32 = 8 * 1024
_MAX_KEYS = 64
_MIN_KEYS = 16  # the least that a matrix product takes along any dimension
_MIN_ROWS = 16


@dataclass(frozen=True, slots=True)
class Tiling:
    """One attention kernel's shape; all sizes are powers of two."""

    num_rows: int
    """Rows of the query tile; each is one query head of one token."""
    num_keys: int
    """Positions of the context that one turn of the loop takes."""
    padded_dim: int
    """The head dimension, rounded up."""
    num_warps: int
    num_stages: int = 5


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number` (at least 1)."""
    return 1 << (number - 1).bit_length()


def decode_tiling(group: int, head_dim: int, itemsize: int) -> Tiling:
    """For one token: the rows are the `group` query heads that share a KV head.

    itemsize   bytes of an element as it is multiplied
    """
    padded_dim = next_power_of_two(max(head_dim, 16))
    return Tiling(
        num_rows=max(_MIN_ROWS, next_power_of_two(group)),
        num_keys=_num_keys(padded_dim, itemsize),
        padded_dim=padded_dim,
        num_warps=8 if itemsize == 4 else 4,
    )


def prefill_tiling(group: int, head_dim: int, itemsize: int) -> Tiling:
    """For many tokens: the rows are as many tokens as fit, times `group` query heads."""
    padded_dim = next_power_of_two(max(head_dim, 16))
    num_rows = 128 if padded_dim == 128 else 64
    if itemsize == 4:
        num_rows = 32
    return Tiling(
        num_rows=max(num_rows, next_power_of_two(group)),
        num_keys=_num_keys(padded_dim, itemsize),
        padded_dim=padded_dim,
        num_warps=8 if itemsize == 4 or padded_dim >= 128 else 4,
    )


def _num_keys(padded_dim: int, itemsize: int) -> int:
    tile_bytes = _KEY_TILE_BYTES_FLOAT32 if itemsize == 4 else _KEY_TILE_BYTES
    return max(_MIN_KEYS, min(_MAX_KEYS, tile_bytes // (padded_dim * itemsize)))
