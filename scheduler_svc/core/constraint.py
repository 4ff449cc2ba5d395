"""What a constraint is to the core: it says which tokens may come next in one sequence.

    mask --> plan --> the worker draws one of its tokens --> accept --> the next mask

A constraint has taken exactly the tokens that are back and count, and knows nothing of what is
sampled in flight. So it stays as it is when its sequence is preempted or its replica is lost. And
its sequence has one token in flight at most, for the next mask is known when that one is back.
"""

from __future__ import annotations

from typing import Protocol

from shared.plan import TokenMask


class ConstraintBroken(Exception):
    """A constraint can't go on: its limits are reached, or it got a token that it doesn't allow.
    The text says which, for the client."""


class TokenConstraint(Protocol):
    """The state of one sequence's constraint, between two of its tokens."""

    @property
    def mask(self) -> TokenMask | None:
        """The tokens that may come next; None when all may."""

    def accept(self, token_id: int) -> bool:
        """Take the next token, which ends nothing by itself; whether another may follow. Raises
        ConstraintBroken."""

    def copy(self) -> TokenConstraint:
        """The same state, for another sequence."""
