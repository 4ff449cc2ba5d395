"""Weights of tokens as integers, whose sums are the same in any order.

    w[t] = exp((logit[t] - max logit) / T)        float64, 1 for the best token
    weight[t] = w[t] rounded to a multiple of 2^-WEIGHT_BITS, and counted in these

Sums of integers do not depend on how many lanes or turns they are made of, so neither a batch nor
a tile's size can change a token. WEIGHT_BITS leaves room for 2^20 tokens in 63 bits;
what weighs less than 2^-43 of the best token, e^-30, is never drawn.
"""

# Kernels are a language of their own: Triton types their arguments at each launch.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

WEIGHT_BITS = 42
MAX_VOCAB_SIZE = 1 << (62 - WEIGHT_BITS)

_ONE = tl.constexpr(float(1 << WEIGHT_BITS))


@triton.jit
def scaled_logits(logits, highest, temperature):
    """float64, at most 0; `highest` and `temperature` are float64."""
    return (logits.to(tl.float64) - highest) / temperature


@triton.jit
def weights_of(logits, highest, temperature):
    """int64; 0 for a logit of -inf."""
    return to_weight(tl.exp(scaled_logits(logits, highest, temperature)))


@triton.jit
def to_weight(value):
    """float64 in [0, 1] as int64; keeps order."""
    return (value * _ONE + 0.5).to(tl.int64)


@triton.jit
def share_of(fraction, total):
    """int64, `fraction` (float64) of the weight `total`, to float64's precision. It is less than
    `total` if the fraction is less than 1: (1 - 2^-53) x rounds to the next float below x, and
    `total` to x by half of that step at most."""
    return (fraction * total.to(tl.float64)).to(tl.int64)


@triton.jit
def is_unsound(highest):
    """Whether a row's largest logit is no number to measure by."""
    return not (tl.abs(highest) < float("inf"))
