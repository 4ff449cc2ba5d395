"""How a sequence draws its tokens: the parameters in force, after defaults."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

GREEDY_BELOW_TEMPERATURE = 1e-5
"""Temperatures below this take the most likely token."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one sequence's draws; values are validated at admission.

    The filters apply in this order to the softmax of `logits / temperature`: top_k, top_p, min_p;
    each one's probabilities are relative to what the one before it left.
    Ranks break ties by the lower token id, so that the candidates are the same on every device.
    """

    temperature: float = 1.0
    top_k: int = 0
    """Candidates by rank; 0 is all."""
    top_p: float = 1.0
    """Smallest set of most likely tokens with at least this probability; 1 is all."""
    min_p: float = 0.0
    """Candidates have at least min_p times the best probability; 0 is all."""
    seed: int = 0
    """64-bit key of the Philox draws, together with sequence index and output position."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW_TEMPERATURE


class EarlyStopping(Enum):
    """When a beam search whose list of ended sequences is full stops; transformers' value in each
    comment. The numbers are those of the public contract."""

    HEURISTIC = 1  # False
    """As soon as the best running beam, scored at its present length, is no better than the worst
    ended sequence."""
    WHEN_FULL = 2  # True
    """At once."""
    NEVER = 3  # "never"
    """As soon as the best running beam can't become better than the worst ended sequence, also
    with a penalty that favours length."""


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Parameters of a beam search; values are validated at admission.

    The score of a sequence is its log-probability / its number of tokens ** length_penalty, with
    the token that ended it.
    """

    width: int
    """Beams that run side by side, and ended sequences that are kept."""
    length_penalty: float = 1.0
    """Above 0 favours long sequences, below 0 short ones."""
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC
    num_return: int = 1
    """How many of the best sequences the client gets."""
