"""Ranks without a sort: integer keys in the order of ranks, and a search for where to cut them.

    key = ordered bits of the logit * 2^32 - token id        int64

The bits of a float32, those below the sign turned over where it is set, are in the order of the
floats. So larger keys rank first, equal logits by the lower id, and no two tokens have one key:
each filter by rank is one least key. The search halves the keys between two candidates, and moves
both ends to a candidate each time: at most 64 turns, mostly about log2 of their number.

Sources: the ordered bits as in any radix sort of floats (Herf, "Radix Tricks", 2001); a search by
pivots in place of a sort as in Park et al., "Qrita" (2026), there approximate and over logits.
"""

# Kernels are a language of their own: Triton types their arguments at each launch.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# ruff: noqa: N803 (what is fixed at compile time stands in capitals)

import triton
import triton.language as tl

LEAST_KEY = tl.constexpr(-(1 << 63))
MOST_KEY = tl.constexpr((1 << 63) - 1)
_SIGNIFICANT = tl.constexpr(0x7FFFFFFF)


@triton.jit
def ordered_bits(logits):
    """int32 in the order of float32; both zeros are one."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & _SIGNIFICANT)


@triton.jit
def rank_keys(logits, ids):
    """int64 keys of float32 `logits` with int32 `ids`."""
    return (ordered_bits(logits).to(tl.int64) << 32) - ids


@triton.jit
def ids_of(keys):
    """int32 ids of rank keys."""
    return (_upper(keys) << 32) - keys


@triton.jit
def logits_of(keys):
    """float32 logits of rank keys."""
    bits = _upper(keys).to(tl.int32)
    bits = bits ^ ((bits >> 31) & _SIGNIFICANT)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _upper(keys):
    return (keys + _SIGNIFICANT) >> 32


@triton.jit
def middle_of(least, most):
    """Between the two, above `least` if they differ; int64 without overflow."""
    return (least | most) - ((least ^ most) >> 1)


@triton.jit
def kept_candidates(keys, weights, start, count, cut, least, BLOCK: tl.constexpr):
    """Keys and weights [BLOCK] of the candidates from `start` on; the weight of one that is not
    kept, and it alone, is 0."""
    places = start + tl.arange(0, BLOCK)
    present = places < count
    key = tl.load(keys + places, mask=present, other=0)
    weight = tl.load(weights + places, mask=present, other=0)
    return key, tl.where((key >= cut) & (weight >= least), weight, 0)


@triton.jit
def typical_keys(keys, mean):
    """int64, the larger the nearer the logits of rank keys are to `mean` (float64).

    As log p = (logit - max) / T - log S, a token's |-log p - H| is |logit - mean logit| / T, the
    mean weighted by p. Bits of floats that are not negative are in the order of the floats.
    """
    return -tl.abs(logits_of(keys).to(tl.float64) - mean).to(tl.int64, bitcast=True)


@triton.jit
def search(
    keys,  # [count] int64 rank keys
    weights,  # [count] int64, positive
    count,
    cut,
    least,
    mean,
    share,  # int64
    WEIGHED: tl.constexpr,
    TYPICAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest key, of rank or typical, such that the candidates with keys not below it are
    `share` together, in weight or in number; the least of all if there is none.

    Only candidates with rank keys >= `cut` and weights >= `least` count; there is one.
    """
    low = tl.full((), MOST_KEY, tl.int64)
    high = tl.full((), LEAST_KEY, tl.int64)
    for start in range(0, count, BLOCK):
        rank, weight = kept_candidates(keys, weights, start, count, cut, least, BLOCK)
        key = typical_keys(rank, mean) if TYPICAL else rank
        low = tl.minimum(low, tl.min(tl.where(weight > 0, key, MOST_KEY)))
        high = tl.maximum(high, tl.max(tl.where(weight > 0, key, LEAST_KEY)))
    while low < high:
        middle = middle_of(low, high)
        reached = tl.full((), 0, tl.int64)
        above = high
        below = low
        for start in range(0, count, BLOCK):
            rank, weight = kept_candidates(keys, weights, start, count, cut, least, BLOCK)
            key = typical_keys(rank, mean) if TYPICAL else rank
            is_kept = weight > 0
            is_above = is_kept & (key >= middle)
            value = weight if WEIGHED else is_kept.to(tl.int64)
            reached += tl.sum(tl.where(is_above, value, 0))
            above = tl.minimum(above, tl.min(tl.where(is_above, key, MOST_KEY)))
            below = tl.maximum(below, tl.max(tl.where(is_kept & (key < middle), key, LEAST_KEY)))
        if reached >= share:
            low = above
        else:
            high = below
    return low
