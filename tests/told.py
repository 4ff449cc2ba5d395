"""Made-up log-probabilities of workers without a model: a function of all tokens before a place, so
that what is told of a wrong place, a wrong token or twice is seen."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from shared.logprobs import LogprobRows, Logprobs

NUM_RANKS = 16


def told_of(token_ids: Sequence[int], places: range, num_top: int) -> Logprobs:
    """What is told of `places` of a sequence, each at least 1; exact in single precision."""
    numbers = [zlib.crc32(repr(list(token_ids[: place + 1])).encode()) for place in places]
    return Logprobs(
        log_probs=tuple(-(number % 4096) / 64 for number in numbers),
        ranks=tuple(1 + number % NUM_RANKS for number in numbers),
        num_top=num_top,
        top_token_ids=tuple((n + rank) % 50 for n in numbers for rank in range(num_top)),
        top_log_probs=tuple(-rank / 4 for _ in numbers for rank in range(num_top)),
    )


def rows_of(told: dict[int, Logprobs]) -> LogprobRows:
    """All that one step tells, by handle."""
    parts = told.values()
    return LogprobRows(
        handles=tuple(told),
        num_places=tuple(len(part.log_probs) for part in parts),
        num_tops=tuple(part.num_top for part in parts),
        log_probs=tuple(value for part in parts for value in part.log_probs),
        ranks=tuple(value for part in parts for value in part.ranks),
        top_token_ids=tuple(value for part in parts for value in part.top_token_ids),
        top_log_probs=tuple(value for part in parts for value in part.top_log_probs),
    )
