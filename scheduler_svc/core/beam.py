"""Beam search of one request, as an algorithm: candidates in, the next beams out.

Source: `_beam_search` of transformers' generation/utils.py, for one prompt and without sampling. In
each step the candidates of all running beams are ranked by their beams' log-probability plus their
own; those that end a sequence and are among the first `width` are kept as hypotheses, of which the
`width` best stay; the first `width` of the others are the next beams.

Sums are in double precision, and ties go to the better beam, then to the lower token id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shared.sampling import BeamParams, EarlyStopping


class Continuation(NamedTuple):
    """A next beam: the running beam of rank `parent` goes on with `token_id`."""

    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A sequence that ended."""

    token_ids: list[int]
    """What was generated, without the token that ended it."""
    score: float
    end_token_id: int | None
    """The token that ended it; None when it has as many tokens as it may."""

    @property
    def num_tokens(self) -> int:
        """What was generated, with the token that ended it."""
        return len(self.token_ids) + (self.end_token_id is not None)


@dataclass(frozen=True, slots=True)
class _Node:
    """A token of a beam and those before it; beams of one origin share them."""

    before: _Node | None
    token_id: int


@dataclass(frozen=True, slots=True)
class _Beam:
    log_prob: float
    last: _Node | None


def num_candidates(width: int, num_end_ids: int) -> int:
    """How many candidates of one beam a search may need: enough for `width` beams to go on, even
    if the best candidates end."""
    return max(2, 1 + num_end_ids) * width


class BeamSearch:
    """The running beams by rank, best first, and the hypotheses, best first."""

    def __init__(self, params: BeamParams, end_ids: frozenset[int], max_tokens: int) -> None:
        """A sequence ends with one of `end_ids`, or with its token number `max_tokens`."""
        self.hypotheses: list[Hypothesis] = []
        self.num_tokens = 0
        """Tokens of each running beam."""
        self._params = params
        self._end_ids = end_ids
        self._max_tokens = max_tokens
        self._beams = [_Beam(0.0, None)]

    @property
    def num_running(self) -> int:
        """Beams that run: one for the first step, then `width`."""
        return len(self._beams)

    def advance(
        self, candidates: Sequence[tuple[Sequence[int], Sequence[float]]]
    ) -> list[Continuation]:
        """Take the candidates of each running beam, token ids and their log-probabilities, best
        first. Gives the next running beams, best first; none when the search has ended."""
        assert len(candidates) == self.num_running, "one list of candidates for each beam"
        ranked = self._rank(candidates)
        self.num_tokens += 1
        is_last = self.num_tokens == self._max_tokens
        self._keep_ended(ranked[: self._params.width], is_last)
        running = [] if is_last else [one for one in ranked if one[2] not in self._end_ids]
        running = running[: self._params.width]
        if not running or self._is_settled(running[0][0]):
            self._beams = []
            return []
        self._beams = [
            _Beam(log_prob, _Node(self._beams[parent].last, token_id))
            for log_prob, parent, token_id in running
        ]
        return [Continuation(parent, token_id) for _, parent, token_id in running]

    def _rank(
        self, candidates: Sequence[tuple[Sequence[int], Sequence[float]]]
    ) -> list[tuple[float, int, int]]:
        """The best candidates over all beams, as (log-probability, beam, token id)."""
        ranked = [
            (beam.log_prob + log_prob, parent, token_id)
            for parent, (beam, (token_ids, log_probs)) in enumerate(
                zip(self._beams, candidates, strict=True)
            )
            for token_id, log_prob in zip(token_ids, log_probs, strict=True)
        ]
        ranked.sort(key=lambda one: (-one[0], one[1], one[2]))
        return ranked[: num_candidates(self._params.width, len(self._end_ids))]

    def _keep_ended(self, best: list[tuple[float, int, int]], is_last: bool) -> None:
        for log_prob, parent, token_id in best:
            is_end = token_id in self._end_ids
            if is_end or is_last:
                token_ids = _tokens_to(self._beams[parent].last)
                if not is_end:
                    token_ids.append(token_id)
                score = self._score(log_prob, self.num_tokens)
                end_token_id = token_id if is_end else None
                self.hypotheses.append(Hypothesis(token_ids, score, end_token_id))
        self.hypotheses.sort(key=lambda one: -one.score)
        del self.hypotheses[self._params.width :]

    def _is_settled(self, best_log_prob: float) -> bool:
        """Whether the running beams, the best of which has `best_log_prob`, are not worth more."""
        params = self._params
        if len(self.hypotheses) < params.width:
            return False
        if params.early_stopping is EarlyStopping.WHEN_FULL:
            return True
        num_tokens = self.num_tokens
        if params.early_stopping is EarlyStopping.NEVER and params.length_penalty > 0:
            num_tokens = self._max_tokens
        return self._score(best_log_prob, num_tokens) <= self.hypotheses[-1].score

    def _score(self, log_prob: float, num_tokens: int) -> float:
        return log_prob / math.pow(num_tokens, self._params.length_penalty)


def _tokens_to(last: _Node | None) -> list[int]:
    token_ids = []
    while last is not None:
        token_ids.append(last.token_id)
        last = last.before
    token_ids.reverse()
    return token_ids
