"""Log-probabilities of tokens as values: flat lists that are passed on without a look at each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities at successive places of a sequence: natural logarithms of the softmax of
    the model's own logits. Each is at most 0, and minus infinity for an impossible token."""

    log_probs: Sequence[float]
    """Of the token at each place."""
    ranks: Sequence[int]
    """Its rank, from 1; of equals the lower id comes first."""
    num_top: int
    top_token_ids: Sequence[int]
    """The `num_top` likeliest tokens of the first place, best first, then those of the next ..."""
    top_log_probs: Sequence[float]


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """The log-probabilities of several sequences, flat: the first `num_places[0]` places are those
    of `handles[0]`, with `num_tops[0]` likeliest tokens each, and so on."""

    handles: Sequence[int] = ()
    num_places: Sequence[int] = ()
    num_tops: Sequence[int] = ()
    log_probs: Sequence[float] = ()
    ranks: Sequence[int] = ()
    top_token_ids: Sequence[int] = ()
    top_log_probs: Sequence[float] = ()

    def by_handle(self) -> dict[int, Logprobs]:
        """Each sequence's own."""
        found, place, top = {}, 0, 0
        for handle, count, num_top in zip(
            self.handles, self.num_places, self.num_tops, strict=True
        ):
            end, top_end = place + count, top + count * num_top
            found[handle] = Logprobs(
                self.log_probs[place:end],
                self.ranks[place:end],
                num_top,
                self.top_token_ids[top:top_end],
                self.top_log_probs[top:top_end],
            )
            place, top = end, top_end
        return found


NO_LOGPROBS = LogprobRows()
