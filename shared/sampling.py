"""How a sequence draws its tokens: the parameters in force, after defaults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain

GREEDY_BELOW_TEMPERATURE = 1e-5
"""Temperatures below this take the most likely token."""


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What changes and excludes logits by token id, before the temperature; by default nothing.

    Applied in the order of the fields; the exclusions, from `allowed_token_ids` on, together.
    Lists of ids hold each id once.
    """

    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output, once each."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Taken from the logits of tokens in the output, times how often each is there."""
    bias_token_ids: Sequence[int] = ()
    biases: Sequence[float] = ()
    """Added to the logits of `bias_token_ids`."""
    allowed_token_ids: Sequence[int] = ()
    """The only ones that are drawn; empty is all."""
    banned_token_ids: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
    """Token sequences that no drawn token completes, over prompt and output; none is empty."""
    min_tokens: int = 0
    """Tokens generated before one of `end_token_ids` is drawn."""
    end_token_ids: Sequence[int] = ()
    """Tokens that end the sequence; empty without `min_tokens`."""

    @property
    def counts_tokens(self) -> bool:
        """Whether a rule depends on which tokens came before, wherever they stand."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def all_token_ids(self) -> Iterator[int]:
        """Every id that a rule names."""
        return chain(
            self.bias_token_ids,
            self.allowed_token_ids,
            self.banned_token_ids,
            *self.bad_words,
            self.end_token_ids,
        )


NO_RULES = TokenRules()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one sequence's draws; values are validated at admission.

    The filters apply in this order to the softmax of `logits / temperature`: top_k, top_p, min_p,
    typical_p; each one's probabilities are relative to what the one before it left.
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
    typical_p: float = 1.0
    """Tokens whose surprise is nearest to the entropy, with at least this probability; 1 is all."""
    rules: TokenRules = NO_RULES
    num_logprobs: int | None = None
    """With each token come its log-probability and those of so many likeliest; None: nothing."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW_TEMPERATURE


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What holds where a request does not say: a model's own values, or these, which change
    nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0


NEUTRAL_DEFAULTS = SamplingDefaults()


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
