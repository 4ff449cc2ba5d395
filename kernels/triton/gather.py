"""Gathers the few tokens of a row that its filters may leave.

A row is read twice at most, whatever the filters. What is gathered, in the order of ids:

    top_k       what reaches the k-th largest of the lanes' maxima, where lane i has read the tokens
                i, i + BLOCK, ...: at least k tokens do, and few more
    else top_p  weights of at least (1 - top_p) * S / (2 n): those of n below that bound hold less
                than half of what top_p leaves out of the sum S (as in `kernels.draw_row`)
    else min_p  weights that pass it
"""

# Kernels are a language of their own: Triton types their arguments at each launch.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# ruff: noqa: N803 (what is fixed at compile time stands in capitals)

import triton
import triton.language as tl

from kernels.triton.parameters import MIN_P, NUM_PARAMETERS, ROW, TEMPERATURE, TOP_K, TOP_P
from kernels.triton.rank_search import ordered_bits, rank_keys
from kernels.triton.weights import is_unsound, to_weight, weights_of

_FLOOR_STEPS = tl.constexpr(16)
"""Sign, exponent and 7 bits of the mantissa: a floor is within 1 % of the lane's maximum."""


@triton.jit
def gather_kernel(
    logits,  # [n, vocab_size] float32
    highest,  # [n] float32, each row's
    parameters,  # [m, NUM_PARAMETERS] float64
    keys,  # [m, vocab_size] int64, written
    weights,  # [m, vocab_size] int64, written
    counts,  # [m] int32, written: how many keys and weights a row has
    totals,  # [m] int64, written: all weights of a row, where top_p goes over all
    stride_row,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Program (place); for a row that is not sound it gathers nothing."""
    place = tl.program_id(0).to(tl.int64)
    parameters += place * NUM_PARAMETERS
    row = tl.load(parameters + ROW).to(tl.int64)
    best = tl.load(highest + row).to(tl.float64)
    if is_unsound(best):
        tl.store(counts + place, 0)
        return
    logits += row * stride_row
    keys += place * vocab_size
    weights += place * vocab_size
    temperature = tl.load(parameters + TEMPERATURE)
    top_k = tl.load(parameters + TOP_K)
    top_p = tl.load(parameters + TOP_P)
    lanes = tl.arange(0, BLOCK)

    floor = tl.full((), -(1 << 31), tl.int32)
    least = tl.full((), 1, tl.int64)
    if (top_k > 0) & (top_k < vocab_size):
        floor = _rank_floor(logits, top_k.to(tl.int32), vocab_size, BLOCK)
    elif top_p < 1.0:
        sums = tl.zeros([BLOCK], tl.int64)
        for start in range(0, vocab_size, BLOCK):
            ids = start + lanes
            part = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
            sums += weights_of(part, best, temperature)
        total = tl.sum(sums)
        tl.store(totals + place, total)
        bound = 0.5 * (1.0 - top_p) * total.to(tl.float64) / vocab_size
        least = tl.maximum(least, bound.to(tl.int64))
    else:
        least = tl.maximum(least, to_weight(tl.load(parameters + MIN_P)))

    count = tl.full((), 0, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + lanes
        part = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
        weight = weights_of(part, best, temperature)
        kept = (ordered_bits(part) >= floor) & (weight >= least)
        slots = count + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(keys + slots, rank_keys(part, ids), mask=kept)
        tl.store(weights + slots, weight, mask=kept)
        count += tl.sum(kept.to(tl.int32))
    tl.store(counts + place, count)


@triton.jit
def _rank_floor(logits, rank, vocab_size, BLOCK: tl.constexpr):
    """Ordered bits that at least `rank` logits reach; the least of all if lanes are too few."""
    lanes = tl.arange(0, BLOCK)
    maxima = tl.full([BLOCK], -(1 << 31), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + lanes
        part = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
        maxima = tl.maximum(maxima, ordered_bits(part))
    floor = tl.full((), -(1 << 31), tl.int64)
    step = tl.full((), 1 << 31, tl.int64)
    for _ in range(_FLOOR_STEPS):
        num_reaching = tl.sum((maxima >= (floor + step).to(tl.int32)).to(tl.int32))
        floor += tl.where(num_reaching >= rank, step, 0)
        step = step >> 1
    return floor.to(tl.int32)
