"""What a worker remembers of its sequences between steps: arrays, one row a handle.

A plan is a difference to this state. Each change checks itself and raises ProtocolError when the
plan can't be meant for this state; the state is not to be trusted afterwards, and the worker ends.

    tokens of a row   0 ........ num_computed ........ num_tokens
                      |-- in the KV cache --|-- known, to compute --|
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shared.errors import ProtocolError
from shared.plan import Fork, SequenceStart, StepPlan
from shared.sampling import GREEDY_BELOW_TEMPERATURE, NO_RULES
from worker_svc.logit_rules import RowRules
from worker_svc.sampling_rows import SamplingRows

MAX_HANDLES = 1 << 16
"""No scheduler keeps so many sequences on one replica; a larger handle is an error."""

Rows = npt.NDArray[np.int64]


class RequestState:
    """Rows of the live sequences. The arrays are read by `input_batch`, and written here alone."""

    def __init__(
        self,
        *,
        num_rows: int,
        context_length: int,
        block_size: int,
        num_blocks: int,
        vocab_size: int,
    ) -> None:
        """`num_rows` is a first guess; the arrays grow with the handles.

        `num_blocks` is the device pool's size, `vocab_size` the number of token ids.
        """
        self.step = 0
        """The last step applied."""
        self.context_length = context_length
        self.block_size = block_size
        self._num_pool_blocks = num_blocks
        self.highest_block = 0
        """The highest block that any sequence has had."""
        self.vocab_size = vocab_size
        max_blocks = -(-context_length // block_size)
        # Pages of these arrays take memory only once they are written.
        self.tokens = np.zeros((num_rows, context_length + 1), np.int32)
        self.block_tables = np.zeros((num_rows, max_blocks), np.int32)
        self.num_blocks = np.zeros(num_rows, np.int64)
        self.num_tokens = np.zeros(num_rows, np.int64)
        self.num_prompt_tokens = np.zeros(num_rows, np.int64)
        self.num_computed = np.zeros(num_rows, np.int64)
        self.is_greedy = np.zeros(num_rows, np.bool_)
        """The rows that take their likeliest token as the model has it, and tell nothing more of
        it."""
        self.num_candidates = np.zeros(num_rows, np.int64)
        """Above 0 for beams; see `shared.plan.SequenceStart`."""
        self._temperature = np.zeros(num_rows, np.float32)
        self._top_k = np.zeros(num_rows, np.int64)
        self._top_p = np.zeros(num_rows, np.float32)
        self._min_p = np.zeros(num_rows, np.float32)
        self._typical_p = np.zeros(num_rows, np.float32)
        self._seed = np.zeros(num_rows, np.uint64)
        self._sequence_index = np.zeros(num_rows, np.int64)
        self.num_logprobs = np.zeros(num_rows, np.int64)
        """What is told of each sampled token: itself and the likeliest; 0 is nothing."""
        self.num_prompt_logprobs = np.zeros(num_rows, np.int64)
        """The same of each token of the prompt from `first_prompt_logprob` on."""
        self.first_prompt_logprob = np.zeros(num_rows, np.int64)
        self._has_rules = np.zeros(num_rows, np.bool_)
        self._live: set[int] = set()
        self.failed: set[int] = set()
        """Live sequences that failed in an earlier step; the scheduler may not know yet."""
        self._rules: dict[int, RowRules] = {}
        """Of the rows that have any; live ones, and older ones until they are used again."""

    def reset(self, step: int = 0) -> None:
        """Forget every sequence, as after `step`."""
        self.step = step
        self._live.clear()
        self.failed.clear()

    def apply(self, plan: StepPlan) -> None:
        """Take in what `plan` says of sequences and blocks; its step begins."""
        if plan.reset:
            self.reset()
        for handle in plan.finished_handles:
            self._check_live([handle])
            self._live.discard(handle)
            self.failed.discard(handle)
        for start in plan.starts:
            self._start(start)
        for fork in plan.forks:
            self._fork(fork)
        if plan.chosen_handles:
            self._choose(plan.chosen_handles, plan.chosen_token_ids)
        if plan.append_handles:
            self._append_blocks(plan.append_handles, plan.append_blocks)
        self.step = plan.step

    def rows(self, handles: Sequence[int]) -> Rows:
        """The rows of live `handles`."""
        self._check_live(handles)
        return np.array(handles, dtype=np.int64)

    def advance(self, rows: Rows, ends: Rows) -> None:
        """The step computed the tokens of `rows` up to `ends`."""
        self.num_computed[rows] = ends

    def append_tokens(self, rows: Rows, token_ids: npt.NDArray[np.int64]) -> None:
        """Each of `rows` goes on with a token."""
        ends = self.num_tokens[rows]
        self.tokens[rows, ends] = token_ids
        self.num_tokens[rows] = ends + 1

    def sampling_rows(self, rows: Rows) -> SamplingRows:
        """The parameters of `rows`, whose next token is to be drawn."""
        return SamplingRows(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            typical_p=self._typical_p[rows],
            seed=self._seed[rows],
            sequence_index=self._sequence_index[rows],
            output_position=self.num_tokens[rows] - self.num_prompt_tokens[rows],
        )

    def rules(self, rows: Rows) -> tuple[list[int], list[RowRules]]:
        """The places in `rows` of those that have rules for the token that is to be drawn, and
        these rules."""
        places: list[int] = np.flatnonzero(self._has_rules[rows]).tolist()
        rules = [self._rules[row] for row in rows[places].tolist()]
        for row, one in zip(rows[places], rules, strict=True):
            one.catch_up(self.tokens[row, : self.num_tokens[row]])
        return places, rules

    def _start(self, start: SequenceStart) -> None:
        handle, num_tokens = start.handle, len(start.token_ids)
        self._make_room(handle)
        if handle in self._live:
            raise ProtocolError(f"the plan starts sequence {handle}, which is there already")
        if num_tokens > self.context_length:
            raise ProtocolError(f"sequence {handle} has {num_tokens} tokens, beyond the context")
        tokens = np.array(start.token_ids, dtype=np.int64)
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise ProtocolError(f"sequence {handle} has tokens beyond the vocabulary")
        blocks = start.block_table
        self._check_blocks(blocks)
        if len(blocks) > self.block_tables.shape[1]:
            raise ProtocolError(f"sequence {handle} has {len(blocks)} blocks, beyond the context")
        self.tokens[handle, :num_tokens] = tokens
        self.block_tables[handle, : len(blocks)] = blocks
        self.num_blocks[handle] = len(blocks)
        self.num_tokens[handle] = num_tokens
        self.num_prompt_tokens[handle] = start.num_prompt_tokens
        self.num_computed[handle] = start.num_computed_tokens
        self.num_candidates[handle] = start.num_candidates
        self._set_sampling(start)
        self._live.add(handle)

    def _set_sampling(self, start: SequenceStart) -> None:
        handle, sampling = start.handle, start.sampling
        self._temperature[handle] = sampling.temperature
        self._top_k[handle] = sampling.top_k
        self._top_p[handle] = sampling.top_p
        self._min_p[handle] = sampling.min_p
        self._typical_p[handle] = sampling.typical_p
        self._seed[handle] = sampling.seed
        self._sequence_index[handle] = start.sequence_index
        self.num_logprobs[handle] = _count(sampling.num_logprobs)
        self.num_prompt_logprobs[handle] = _count(start.num_prompt_logprobs)
        self.first_prompt_logprob[handle] = start.first_prompt_logprob
        self._has_rules[handle] = sampling.rules != NO_RULES
        if self._has_rules[handle]:
            if max(sampling.rules.all_token_ids(), default=0) >= self.vocab_size:
                raise ProtocolError(f"sequence {handle} has rules beyond the vocabulary")
            self._rules[handle] = RowRules(sampling.rules, start.num_prompt_tokens)
        else:
            self._rules.pop(handle, None)
        self.is_greedy[handle] = (
            self._temperature[handle] < GREEDY_BELOW_TEMPERATURE
            and sampling.rules == NO_RULES
            and sampling.num_logprobs is None
            and not start.num_candidates
        )

    def _fork(self, fork: Fork) -> None:
        [source] = self.rows([fork.source])
        self._make_room(fork.handle)
        if fork.handle in self._live:
            raise ProtocolError(f"the plan forks sequence {fork.handle}, which is there already")
        self._check_blocks([fork.block])
        num_full = self.num_computed[source] // self.block_size
        if num_full >= self.block_tables.shape[1]:
            raise ProtocolError(f"the plan forks sequence {source} beyond the context")
        for array in self._arrays().values():
            array[fork.handle] = array[source]
        self.block_tables[fork.handle, num_full] = fork.block
        self.num_blocks[fork.handle] = num_full + 1
        self._live.add(fork.handle)
        if fork.source in self.failed:
            self.failed.add(fork.handle)

    def _choose(self, handles: Sequence[int], token_ids: Sequence[int]) -> None:
        rows = self.rows(handles)
        tokens = np.array(token_ids, dtype=np.int64)
        if tokens.max() >= self.vocab_size or self.num_tokens[rows].max() >= self.context_length:
            raise ProtocolError("the plan chooses tokens beyond the vocabulary or the context")
        self.append_tokens(rows, tokens)

    def _append_blocks(self, handles: Sequence[int], block_ids: Sequence[int]) -> None:
        """A handle may come several times; its blocks keep their order."""
        self._check_live(handles)
        self._check_blocks(block_ids)
        num_columns = self.block_tables.shape[1]
        for handle, block in zip(handles, block_ids, strict=True):
            column = self.num_blocks[handle]
            if column == num_columns:
                raise ProtocolError("the plan appends blocks beyond the context")
            self.block_tables[handle, column] = block
            self.num_blocks[handle] = column + 1

    def _check_live(self, handles: Sequence[int]) -> None:
        if not self._live.issuperset(handles):
            unknown = [handle for handle in handles if handle not in self._live]
            raise ProtocolError(f"the plan names the unknown sequences {unknown}")

    def _check_blocks(self, block_ids: Sequence[int]) -> None:
        if not len(block_ids):
            return
        highest = max(block_ids)
        if not 0 <= min(block_ids) <= highest < self._num_pool_blocks:
            raise ProtocolError(
                f"the plan names block {highest} of a pool of {self._num_pool_blocks}"
            )
        self.highest_block = max(self.highest_block, highest)

    def _make_room(self, handle: int) -> None:
        """Double the arrays until `handle` is a row."""
        num_rows = len(self.num_tokens)
        if handle < num_rows:
            return
        if handle >= MAX_HANDLES:
            raise ProtocolError(f"handle {handle} is beyond the limit of {MAX_HANDLES}")
        while num_rows <= handle:
            num_rows *= 2
        for name, array in self._arrays().items():
            grown = np.zeros((num_rows, *array.shape[1:]), array.dtype)
            grown[: len(array)] = array
            setattr(self, name, grown)

    def _arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """All that has a row for each handle."""
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}


def _count(num_logprobs: int | None) -> int:
    """The chosen token counts as one."""
    return 0 if num_logprobs is None else 1 + num_logprobs
