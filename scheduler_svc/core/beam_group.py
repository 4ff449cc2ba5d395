"""The beams of one request while they run: which sequence each one is, and how far the step is.

Beams advance together. A step of theirs takes two of the replica's, and others run on meanwhile:

    planned, each gives candidates --> all are back: choose --> the next plan forks and goes on

A beam that nothing goes on from leaves its row when the choice is made; sequences without a row
are held until a beam is forked into one. The beams' tokens are in the search alone: rows and token
lists know the prompt. Leaving the replica therefore loses the search, and nothing else: it begins
again from the prompt and comes to the same end, and no client has seen any of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_svc.core.beam import BeamSearch, Hypothesis
from shared.plan import Candidates


@dataclass(frozen=True, slots=True)
class ChosenToken:
    """A next beam: the sequence of index `parent`, which runs, goes on with `token_id` in its own
    row, or is forked."""

    parent: int
    token_id: int
    is_fork: bool


class BeamGroup:
    """Made anew whenever the request's first sequence starts on a replica. Sequences are named by
    their index in the request."""

    def __init__(self, search: BeamSearch, num_candidates: int) -> None:
        self.num_candidates = num_candidates
        """How many each beam gives in a step."""
        self.num_generated = 0
        """Tokens of all beams so far, dropped ones included."""
        self.chosen: list[ChosenToken] = []
        """The next beams, best first, until a plan goes on with them."""
        self._search = search
        self._running = [0]  # by rank
        self._candidates: dict[int, Candidates] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens of each running beam after the prompt, as far as they are chosen."""
        return self._search.num_tokens

    @property
    def hypotheses(self) -> Sequence[Hypothesis]:
        """The sequences that ended, best first."""
        return self._search.hypotheses

    def take(self, index: int, candidates: Candidates) -> bool:
        """The candidates of one running beam; whether they are all there."""
        assert index in self._running and index not in self._candidates
        self.num_generated += 1
        self._candidates[index] = candidates
        return len(self._candidates) == len(self._running)

    def choose(self) -> list[int]:
        """With all candidates there: choose the next beams, and give the sequences that no beam
        goes on from. Nothing is chosen when the search has ended."""
        found = [self._candidates[index] for index in self._running]
        self._candidates.clear()
        continuations = self._search.advance([(one.token_ids, one.log_probs) for one in found])
        parents: set[int] = set()
        for rank, token_id in continuations:
            parent = self._running[rank]
            self.chosen.append(ChosenToken(parent, token_id, is_fork=parent in parents))
            parents.add(parent)
        return [index for index in self._running if index not in parents]

    def go_on(self, running: list[int]) -> None:
        """A plan is made: the sequences `running` are what was chosen, in that order."""
        assert len(running) == len(self.chosen)
        self._running = running
        self.chosen = []
