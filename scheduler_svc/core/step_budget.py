"""What one step may take: tokens by the token budget, and time beside decodes by the target.

    token budget  | decodes, beams | chunk | chunk | ... left |
    target        | decodes        | chunks |--- left ---| headroom |

Decodes are entered first, then each chunk takes its part of what is left. Times are expected by
the replica's measured costs.
"""

from __future__ import annotations

from scheduler_svc.core.replica import Replica
from scheduler_svc.core.sequence_table import Ints
from scheduler_svc.core.step_cost import StepWork, attention_of

HEADROOM = 0.9
"""Part of the target between tokens that is planned for: expectations miss by some percent."""
MIN_PREFILL_SHARE = 1.0
"""Where decodes alone come near the target or miss it, prompts may add this part of their time."""
MIN_CHUNK_TOKENS = 16
"""A step with prompt work does at least so much of it, whatever the target."""


class StepBudget:
    """The budget of one step of `replica`; made for it and thrown away."""

    def __init__(self, replica: Replica, target_itl_s: float | None) -> None:
        """`target_itl_s` is the most seconds that streams shall wait for a token beside prompts;
        None is no such target."""
        self._replica = replica
        self._target_itl_s = target_itl_s
        self._num_tokens = replica.token_budget
        self._time_s: float | None = None
        self._decodes: Ints | None = None
        self._num_beams = 0
        self._num_chunk_tokens = 0
        self._chunk_attention = 0.0

    def take_decodes(self, rows: Ints, num_beams: int) -> None:
        """`rows` decode, and so many beams with them."""
        self._decodes = rows
        self._num_beams = num_beams
        self._num_tokens -= rows.size + num_beams

    def take_chunk(self, depth: int, remaining: int) -> int:
        """How many of the `remaining` tokens of a sequence with `depth` computed ones this step
        computes, at least one; there must be room."""
        cost = self._replica.cost
        num_new = min(remaining, self._num_tokens)
        if (left_s := self._time_left()) is not None:
            num_new = min(num_new, max(MIN_CHUNK_TOKENS, cost.chunk_tokens(depth, left_s)))
            self._time_s = left_s - cost.prefill_s(depth, num_new)
        self._num_tokens -= num_new
        self._num_chunk_tokens += num_new
        self._chunk_attention += attention_of(depth, num_new)
        return num_new

    @property
    def has_room(self) -> bool:
        """Whether tokens are left, and time for a chunk that is worth it."""
        if self._num_tokens <= 0:
            return False
        left_s = self._time_left()
        if left_s is None or not self._num_chunk_tokens:
            return True
        return self._replica.cost.chunk_tokens(0, left_s) >= MIN_CHUNK_TOKENS

    def work(self) -> StepWork:
        """All that was taken."""
        return self._decode_work()._replace(
            num_chunk_tokens=self._num_chunk_tokens, chunk_attention=self._chunk_attention
        )

    def _time_left(self) -> float | None:
        """What the target leaves for chunks in this step; None without decodes or target."""
        if self._target_itl_s is None or self._decodes is None or not self._decodes.size:
            return None
        if self._time_s is None:
            decodes_s = self._replica.cost.step_s(self._decode_work())
            spare_s = HEADROOM * self._target_itl_s - decodes_s
            self._time_s = max(spare_s, MIN_PREFILL_SHARE * decodes_s)
        return self._time_s

    def _decode_work(self) -> StepWork:
        assert self._decodes is not None, "decodes come first"
        context = self._replica.table.num_computed[self._decodes].sum()
        return StepWork(
            num_decodes=self._decodes.size + self._num_beams, decode_context=int(context)
        )
