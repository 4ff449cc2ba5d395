"""What the engines are compared on: a few loads that stand for ways in which servers are used."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.workload import Workload

TOKENS_PER_WORD = 1.25
"""An upper bound for the generator's common words, which are about one token each; sizes caches."""

WARM_UP_SEED = 1_000_003
WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Scenario:
    """A closed loop of `num_clients` over `load`; with `long`, one more client sends these prompts
    one after another while the others' streams decode."""

    name: str
    load: Workload
    num_clients: int
    long: Workload | None = None

    @property
    def num_streams(self) -> int:
        """Requests that run at one time, at most."""
        return self.num_clients + (self.long is not None)

    @property
    def longest_tokens(self) -> int:
        """Prompt and answer of the longest request, at most."""
        return max(_tokens(workload) for workload in (self.load, self.long or self.load))

    @property
    def total_tokens(self) -> int:
        """Prompts and answers of all that runs at one time, at most."""
        return self.num_clients * _tokens(self.load) + (_tokens(self.long) if self.long else 0)

    def warm_up(self) -> Scenario:
        """The same shape, shorter and of another seed, so that nothing measured is cached."""
        load = replace(
            self.load, num_requests=self.num_clients, max_tokens=WARM_UP_TOKENS, seed=WARM_UP_SEED
        )
        long = self.long and replace(self.long, num_requests=1, seed=WARM_UP_SEED)
        return replace(self, load=load, long=long)


def _tokens(workload: Workload) -> int:
    return int(workload.prompt_words * TOKENS_PER_WORD) + workload.max_tokens


def _load(
    num_requests: int, words: int, max_tokens: int, *, shared: int = 0, is_mixed: bool = False
) -> Workload:
    return Workload(num_requests, words, shared, max_tokens, is_mixed=is_mixed)


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("chat_1", _load(6, 32, 64), num_clients=1),
        Scenario("batch_8", _load(24, 64, 64), num_clients=8),
        Scenario("batch_32", _load(64, 64, 64), num_clients=32),
        Scenario("shared_16", _load(48, 544, 32, shared=512), num_clients=16),
        Scenario("mixed_16", _load(48, 512, 256, is_mixed=True), num_clients=16),
        Scenario("burst_48", _load(48, 64, 32), num_clients=48),
        Scenario("long_among", _load(8, 64, 384), num_clients=8, long=_load(2, 4000, 16)),
    )
}
