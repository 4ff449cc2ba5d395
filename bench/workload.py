"""What a load run sends: seeded prompts of common words, and seeded arrival times."""

from __future__ import annotations

import random
from dataclasses import dataclass

_COMMON = (
    "the of and to in is that for it as was with be by on not he his but at are this have from "
    "or had an they which one you were all her she there would their we him been has when who "
    "will no more if out so up said what its about than into them can only other time new some "
    "could these two may first then do any like my now over such our man me even most made after "
    "also did many off before must well back through years much where your way down should "
    "because long each just state those people too world very good day still life work old part "
    "night house water small hand river light stone garden winter letter morning window"
)
WORDS = tuple(_COMMON.split())
"""Words that most vocabularies hold as one token each, so that words are nearly tokens."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A set of requests; the same values always give the same prompts and arrivals."""

    num_requests: int
    prompt_words: int
    """Words in each prompt, the shared ones among them."""
    shared_words: int
    """Words at the start that all prompts have in common; they can come from the prefix cache."""
    max_tokens: int
    """Tokens that each request generates; the end of sequence is ignored."""
    seed: int = 0

    def __post_init__(self) -> None:
        assert self.num_requests > 0 and self.max_tokens > 0
        assert 0 <= self.shared_words <= self.prompt_words and self.prompt_words > 0

    def prompts(self) -> list[str]:
        """One prompt for each request. After the shared words no two go on alike but by chance."""
        shared = _words(random.Random(f"{self.seed} shared"), self.shared_words)
        own_words = self.prompt_words - self.shared_words
        return [
            " ".join(shared + _words(random.Random(f"{self.seed} {index}"), own_words))
            for index in range(self.num_requests)
        ]

    def arrivals_s(self, rate: float) -> list[float]:
        """Seconds from the start at which each request arrives: a Poisson process with `rate`
        requests a second, so exponential gaps."""
        draws = random.Random(f"{self.seed} arrivals")
        at_s, arrivals = 0.0, []
        for _ in range(self.num_requests):
            at_s += draws.expovariate(rate)
            arrivals.append(at_s)
        return arrivals


def _words(draws: random.Random, count: int) -> list[str]:
    return draws.choices(WORDS, k=count)
