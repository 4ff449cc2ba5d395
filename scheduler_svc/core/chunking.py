"""How long a prompt's chunk may be, by its work rather than its tokens alone: attention over a
deep context makes the same number of tokens slower, and whoever decodes beside it waits."""

from __future__ import annotations

import math


def chunk_cost(depth: int, num_new: int, parity: int) -> int:
    """Work of `num_new` tokens after `depth` others, in tokens at depth 0, rounded up: a token
    costs 1 and 1 / `parity` more for each token before it."""
    return math.ceil(num_new * (1 + (depth + num_new / 2) / parity))


def chunk_tokens(depth: int, budget: int, parity: int) -> int:
    """The most tokens, at least 1, whose chunk_cost is about `budget`; never more than that."""
    reach = parity + depth
    return max(1, min(budget, int(math.sqrt(reach * reach + 2 * parity * budget) - reach)))
