"""What a load run sends: seeded prompts of common words, and seeded arrival times."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

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


SHORTEST_SHARE = 1 / 8
"""Of a mixed workload's lengths, beside the longest."""


class Job(NamedTuple):
    """One request."""

    prompt: str
    max_tokens: int
    """Tokens that it generates, exactly."""


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
    is_mixed: bool = False
    """Each request has lengths of its own: of its words after the shared ones, and of its answer,
    from an eighth of the figures above up to them, small ones as likely as large ones (their
    logarithm is uniform)."""

    def __post_init__(self) -> None:
        assert self.num_requests > 0 and self.max_tokens > 0
        assert 0 <= self.shared_words <= self.prompt_words and self.prompt_words > 0

    def jobs(self) -> list[Job]:
        """The requests. After the shared words no two prompts go on alike but by chance."""
        shared = _words(random.Random(f"{self.seed} shared"), self.shared_words)
        lengths = random.Random(f"{self.seed} lengths")
        jobs = []
        for index in range(self.num_requests):
            num_own, max_tokens = self.prompt_words - self.shared_words, self.max_tokens
            if self.is_mixed:
                num_own, max_tokens = _shorten(lengths, num_own), _shorten(lengths, max_tokens)
            own = _words(random.Random(f"{self.seed} {index}"), num_own)
            jobs.append(Job(" ".join(shared + own), max_tokens))
        return jobs

    def prompts(self) -> list[str]:
        """The prompt of each request."""
        return [job.prompt for job in self.jobs()]

    def arrivals_s(self, rate: float) -> list[float]:
        """Seconds from the start at which each request arrives: a Poisson process with `rate`
        requests a second, so exponential gaps."""
        draws = random.Random(f"{self.seed} arrivals")
        at_s, arrivals = 0.0, []
        for _ in range(self.num_requests):
            at_s += draws.expovariate(rate)
            arrivals.append(at_s)
        return arrivals


def _shorten(draws: random.Random, length: int) -> int:
    return round(length * SHORTEST_SHARE ** draws.random())


def _words(draws: random.Random, count: int) -> list[str]:
    return draws.choices(WORDS, k=count)
