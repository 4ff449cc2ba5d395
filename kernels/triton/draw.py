"""The draws: the first token, in the order of ids, at which the running sum of the kept weights
passes the row's number times their sum. `kernels.draw_row` has the whole rule."""

# Kernels are a language of their own: Triton types their arguments at each launch.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# ruff: noqa: N803 (what is fixed at compile time stands in capitals)

import triton
import triton.language as tl

from kernels.triton.parameters import (
    MIN_P,
    NUM_PARAMETERS,
    NUMBER,
    ROW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TYPICAL_P,
)
from kernels.triton.rank_search import (
    LEAST_KEY,
    ids_of,
    kept_candidates,
    logits_of,
    search,
    typical_keys,
)
from kernels.triton.weights import is_unsound, share_of, to_weight, weights_of

UNSOUND, SOUND, EMPTY = (tl.constexpr(state) for state in range(3))
"""What a row is: it holds a NaN or its largest logit is infinite; it can be drawn of; nothing of it
is left."""


@triton.jit
def best_kernel(
    logits,  # [n, vocab_size] float32
    highest,  # [n] float32, written: the largest of each row, NaN where there is one
    results,  # [n, 2] int32, written: its lowest id, and one of UNSOUND, SOUND, EMPTY
    stride_row,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride_row
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_ids = tl.zeros([BLOCK], tl.int32)
    has_nan = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + lanes
        part = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
        is_better = part > best
        best_ids = tl.where(is_better, ids, best_ids)
        best = tl.where(is_better, part, best)
        has_nan = tl.where(tl.abs(part) <= float("inf"), has_nan, 1)
    most = tl.max(best)
    token = tl.min(tl.where(best == most, best_ids, vocab_size))
    most = tl.where(tl.max(has_nan) == 1, float("nan"), most)
    tl.store(highest + row, most)
    tl.store(results + row * 2, token)
    state = tl.where(is_unsound(most), UNSOUND, SOUND)
    tl.store(results + row * 2 + 1, tl.where(most == float("-inf"), EMPTY, state))


@triton.jit
def draw_kernel(
    logits,  # [n, vocab_size] float32
    highest,  # [n] float32
    parameters,  # [m, NUM_PARAMETERS] float64
    results,  # [n, 2] int32, the first of each row that draws is written
    stride_row,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Program (place) draws of the whole vocabulary; it passes over a row that is not sound."""
    parameters += tl.program_id(0) * NUM_PARAMETERS
    row = tl.load(parameters + ROW).to(tl.int64)
    best = tl.load(highest + row).to(tl.float64)
    if is_unsound(best):
        return
    temperature = tl.load(parameters + TEMPERATURE)
    logits += row * stride_row
    ids = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab_size, BLOCK):
        sums += _weights(logits, start + ids, vocab_size, best, temperature)
    target = share_of(tl.load(parameters + NUMBER), tl.sum(sums))

    weights = _weights(logits, ids, vocab_size, best, temperature)
    before = tl.full((), 0, tl.int64)
    after = tl.sum(weights)
    while after <= target:  # ends, as the sum of all is above the target
        ids += BLOCK
        weights = _weights(logits, ids, vocab_size, best, temperature)
        before = after
        after += tl.sum(weights)
    is_passed = before + tl.cumsum(weights, 0) > target
    tl.store(results + row * 2, tl.min(tl.where(is_passed, ids, vocab_size)))


@triton.jit
def _weights(logits, ids, vocab_size, best, temperature):
    part = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
    return weights_of(part, best, temperature)


@triton.jit
def draw_candidates_kernel(
    parameters,  # [m, NUM_PARAMETERS] float64
    keys,  # [m, vocab_size] int64
    weights,  # [m, vocab_size] int64
    counts,  # [m] int32
    totals,  # [m] int64
    results,  # [n, 2] int32, the first of each row that draws is written
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Program (place) filters what is gathered, and draws of what is left.

    Each filter lifts one of three bounds: a candidate is kept if its rank key reaches `cut`, its
    weight `least`, and it is as typical as `edge`.
    """
    place = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + place)
    if count == 0:
        return
    parameters += place * NUM_PARAMETERS
    top_k = tl.load(parameters + TOP_K)
    top_p = tl.load(parameters + TOP_P)
    typical_p = tl.load(parameters + TYPICAL_P)
    keys += place * vocab_size
    weights += place * vocab_size

    cut = tl.full((), LEAST_KEY, tl.int64)
    least = tl.full((), 1, tl.int64)
    edge = tl.full((), LEAST_KEY, tl.int64)
    mean = tl.full((), 0.0, tl.float64)
    is_ranked = (top_k > 0) & (top_k < vocab_size)
    if is_ranked:
        share = top_k.to(tl.int64)
        cut = search(keys, weights, count, cut, least, mean, share, False, False, BLOCK)
    if top_p < 1.0:
        total = tl.load(totals + place)
        if is_ranked:
            total = _total(keys, weights, count, cut, least, mean, edge, BLOCK)
        share = share_of(top_p, total)
        cut = search(keys, weights, count, cut, least, mean, share, True, False, BLOCK)
    least = tl.maximum(least, to_weight(tl.load(parameters + MIN_P)))
    total = _total(keys, weights, count, cut, least, mean, edge, BLOCK)
    if typical_p < 1.0:
        mean = _mean_logit(keys, weights, count, cut, least, BLOCK) / total.to(tl.float64)
        share = share_of(typical_p, total)
        edge = search(keys, weights, count, cut, least, mean, share, True, True, BLOCK)
        total = _total(keys, weights, count, cut, least, mean, edge, BLOCK)
    target = share_of(tl.load(parameters + NUMBER), total)

    start = tl.full((), 0, tl.int32)
    key, weight = _left(keys, weights, start, count, cut, least, mean, edge, BLOCK)
    before = tl.full((), 0, tl.int64)
    after = tl.sum(weight)
    while after <= target:
        start += BLOCK
        key, weight = _left(keys, weights, start, count, cut, least, mean, edge, BLOCK)
        before = after
        after += tl.sum(weight)
    is_passed = before + tl.cumsum(weight, 0) > target
    token = tl.min(tl.where(is_passed & (weight > 0), ids_of(key), vocab_size))
    row = tl.load(parameters + ROW).to(tl.int64)
    tl.store(results + row * 2, token.to(tl.int32))


@triton.jit
def _left(keys, weights, start, count, cut, least, mean, edge, BLOCK: tl.constexpr):
    """Keys and weights as of `kept_candidates`, after the typical filter too."""
    key, weight = kept_candidates(keys, weights, start, count, cut, least, BLOCK)
    return key, tl.where(typical_keys(key, mean) >= edge, weight, 0)


@triton.jit
def _total(keys, weights, count, cut, least, mean, edge, BLOCK: tl.constexpr):
    """int64, of what is left."""
    sums = tl.zeros([BLOCK], tl.int64)
    for start in range(0, count, BLOCK):
        _, weight = _left(keys, weights, start, count, cut, least, mean, edge, BLOCK)
        sums += weight
    return tl.sum(sums)


@triton.jit
def _mean_logit(keys, weights, count, cut, least, BLOCK: tl.constexpr):
    """float64, the sum of weight * logit."""
    sums = tl.zeros([BLOCK], tl.float64)
    for start in range(0, count, BLOCK):
        key, weight = kept_candidates(keys, weights, start, count, cut, least, BLOCK)
        sums += weight.to(tl.float64) * tl.where(weight > 0, logits_of(key).to(tl.float64), 0.0)
    return tl.sum(sums)
