"""What a step costs in time, learnt from the steps that are back.

The time of a step is taken as a sum over its work:

    fixed + tokens of chunks + attention of chunks + rows that decode + their context

and each part's factor is fitted by recursive least squares. Old steps are forgotten along the
direction of the new one alone (Cao and Schwartz, "A directional forgetting algorithm based on the
decomposition of the information matrix", Automatica 36, 2000), so that thousands of pure decode
steps leave the cost of chunks as it was.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

UNKNOWN_TOKEN_S = 1e-4
"""Seconds for a token until the first steps are back, on a replica that measured no rate."""
PRIOR_STEP_S = 1e-3
PRIOR_PARITY_TOKENS = 4096
"""Context at which, until it is measured, attention costs as much as the rest of a token."""
PRIOR_PRECISION = 1e-3
"""Of each factor, in steps: a few steps outweigh the prior."""
FORGETTING = 0.98
"""What earlier steps of the same kind weigh beside a new one: fifty of them count."""
MAX_SURPRISE = 3.0
"""A step that takes this many times the expected time counts no more than that: the machine, not
the work, was at fault."""
MIN_FACTOR, MAX_FACTOR = 1e-3, 1e3
"""Factors stay within these times their prior, so that no part of the work is free."""


class StepWork(NamedTuple):
    """What a step computes, in the units of the model."""

    num_chunk_tokens: int = 0
    chunk_attention: float = 0.0
    """Over the tokens of all chunks: how many tokens stand before each."""
    num_decodes: int = 0
    decode_context: int = 0
    """Tokens that stand before the decoding ones, over all rows."""


def attention_of(depth: int, num_new: int) -> float:
    """Token pairs that a chunk of `num_new` tokens after `depth` others attends to."""
    return num_new * (depth + num_new / 2)


class StepCost:
    """The model of one replica. All times are seconds of the worker's own clock."""

    def __init__(self, prefill_tokens_per_s: float) -> None:
        """`prefill_tokens_per_s` as the replica measured it; 0 when it did not."""
        token_s = 1 / prefill_tokens_per_s if prefill_tokens_per_s else UNKNOWN_TOKEN_S
        pair_s = token_s / PRIOR_PARITY_TOKENS
        self._prior: Floats = np.array([PRIOR_STEP_S, token_s, pair_s, token_s, pair_s])
        self._factors: Floats = np.ones(5)
        self._information: Floats = PRIOR_PRECISION * np.eye(5)
        self._set_rates()

    # -- learning -----------------------------------------------------------------------------

    def learn(self, work: StepWork, step_s: float) -> None:
        """A step with `work` took `step_s`; what is no time above 0 is ignored."""
        if not 0 < step_s < math.inf:
            return
        expected_s = self.step_s(work)
        # Relative to the expected time, so that short steps count as much as long ones.
        features = self._prior * (1.0, *work) / expected_s
        ratio = min(step_s / expected_s, MAX_SURPRISE)
        gain = self._information @ features
        self._information -= (1 - FORGETTING) / float(features @ gain) * np.outer(gain, gain)
        self._information += np.outer(features, features)
        change = np.linalg.solve(self._information, features) * (ratio - 1)
        self._factors = np.clip(self._factors + change, MIN_FACTOR, MAX_FACTOR)
        self._set_rates()

    def _set_rates(self) -> None:
        fixed_s, token_s, pair_s, row_s, context_s = map(float, self._prior * self._factors)
        self._fixed_s, self._pair_s, self._context_s = fixed_s, pair_s, context_s
        self.token_s = token_s
        """Seconds that a prompt's token at its start adds to a step."""
        self.row_s = row_s
        """Seconds that a decoding row adds to a step, without its context."""

    # -- expectations -------------------------------------------------------------------------

    def step_s(self, work: StepWork) -> float:
        """Expected time of a step."""
        return (
            self._fixed_s
            + self.token_s * work.num_chunk_tokens
            + self._pair_s * work.chunk_attention
            + self.row_s * work.num_decodes
            + self._context_s * work.decode_context
        )

    def prefill_s(self, depth: int, num_new: int) -> float:
        """Expected time that `num_new` tokens after `depth` others add to steps."""
        return self.token_s * num_new + self._pair_s * attention_of(depth, num_new)

    def chunk_tokens(self, depth: int, budget_s: float) -> int:
        """The most tokens after `depth` others that prefill_s gives `budget_s` for: the root of
        pair/2 n^2 + (token + pair depth) n = budget, in its form without cancellation."""
        if budget_s <= 0:
            return 0
        linear = self.token_s + self._pair_s * depth
        return int(2 * budget_s / (linear + math.sqrt(linear**2 + 2 * self._pair_s * budget_s)))
