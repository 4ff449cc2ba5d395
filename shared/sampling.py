"""How a sequence draws its tokens: the parameters in force, after defaults."""

from __future__ import annotations

from dataclasses import dataclass

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
