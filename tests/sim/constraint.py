"""A constraint for simulated worlds: what it allows depends on every token before, and on nothing
else, so that a lost, a doubled or a foreign token changes every mask after it."""

from __future__ import annotations

from shared.plan import TokenMask
from tests.sim.model import NUM_TOKEN_IDS

COMPLETES_ONCE_IN = 12
ALLOWS_ALL_ONCE_IN = 8


class SimConstraint:
    """Allows a few tokens, or all of them, after each token, and is complete sooner or later."""

    def __init__(self, key: int) -> None:
        """Another `key` allows others."""
        self._state = hash((key,))

    @property
    def mask(self) -> TokenMask | None:
        if self._state % ALLOWS_ALL_ONCE_IN == 0:
            return None
        first, stride = self._state % 7, self._state % 11 + 2
        return TokenMask(token_ids=tuple(range(first, NUM_TOKEN_IDS, stride)))

    def accept(self, token_id: int) -> bool:
        mask = self.mask
        assert mask is None or token_id in mask.token_ids, "a token that the mask doesn't allow"
        self._state = hash((self._state, token_id))
        return self._state % COMPLETES_ONCE_IN != 0

    def copy(self) -> SimConstraint:
        same = SimConstraint(0)
        same._state = self._state
        return same
