"""One replica as the scheduler sees it: what runs there, what it holds, what is on its way."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_svc.core.beam import BeamSearch, num_candidates
from scheduler_svc.core.beam_group import BeamGroup
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.kv_cache_manager import KVCacheManager, PrefixMatch
from scheduler_svc.core.messages import NewRequest, ReplicaCapacity
from scheduler_svc.core.prefix_index import BlockHasher
from scheduler_svc.core.request import Request, Sequence
from scheduler_svc.core.sequence_table import Ints, RowIndex, SequenceTable
from scheduler_svc.core.states import SequenceState
from scheduler_svc.core.step_cost import StepCost, StepWork
from shared.ids import ReplicaId, RequestId

MAX_PLANS_IN_FLIGHT = 2


class PromptPlaces(NamedTuple):
    """Places of a prompt whose log-probabilities a step tells: from `first` to before `end`."""

    first: int
    end: int
    num_top: int


class LeftRow(NamedTuple):
    """A sequence as it left a row that plans in flight compute."""

    seq: Sequence
    blocks: list[int]
    """Its table."""


@dataclass(slots=True)
class StepRecord:
    """A plan in flight: what its result must fit, and what waits for it.

    A row is still the plan's own while it is not in `left`.
    """

    step: int
    sample_rows: Ints  # rows that sample, in the plan's order
    sample_index: RowIndex  # the same, to look into the table's arrays
    sample_handles: list[int]  # the same, as the result names them
    chunk_rows: list[int]
    chunk_ends: list[int]
    """Tokens computed after this step, for each of chunk_rows."""
    blocks: list[list[int]] = field(default_factory=list)
    """Tables whose references are dropped when the result is back."""
    host_blocks: list[list[int]] = field(default_factory=list)
    """The same for host blocks."""
    work: StepWork | None = None
    """What the step computes, where its time is to be learnt from."""
    candidate_rows: list[int] = field(default_factory=list)
    """Beams that give candidates, in the plan's order."""
    num_logprobs: dict[int, int] = field(default_factory=dict)
    """Sampling rows whose tokens' log-probabilities are told, each with how many likeliest ones."""
    prompt_places: dict[int, PromptPlaces] = field(default_factory=dict)
    """The same for rows whose prompts' are told, in the plan's order."""
    left: dict[int, LeftRow] = field(default_factory=dict)
    """Rows whose sequences left while this plan was in flight: what comes for them is not for
    whoever has the row now; their failure must be heard."""

    def names(self, row: int) -> bool:
        """Whether the plan computes `row`."""
        return row in self.sample_handles or row in self.chunk_rows or row in self.candidate_rows


class Replica:
    """Mutable state of one membership. Handles are rows of `table`.

    A row that leaves is named in the next plan's finished handles, and is free after that plan.
    There are twice as many rows as sequences may run, so that none waits for that.
    """

    def __init__(
        self,
        replica_id: ReplicaId,
        capacity: ReplicaCapacity,
        config: SchedulerConfig,
        hasher: BlockHasher,
    ) -> None:
        self.id = replica_id
        self.capacity = capacity
        self.token_budget = min(capacity.max_num_batched_tokens, config.max_num_batched_tokens)
        self.max_num_seqs = min(capacity.max_num_seqs, config.max_num_seqs, self.token_budget)
        self.kv = KVCacheManager(
            capacity.num_device_blocks,
            capacity.num_host_blocks,
            capacity.block_size,
            hasher,
            enable_prefix_cache=config.enable_prefix_cache,
        )
        self.table = SequenceTable(2 * self.max_num_seqs, capacity.block_size)
        self.cost = StepCost(capacity.prefill_tokens_per_s)
        self.swapped: list[Sequence] = []
        self.in_flight: deque[StepRecord] = deque()
        self.last_step = 0
        self.base_step = 0
        self.must_reset = False
        self.is_draining = False
        self.num_deferred_blocks = 0
        """Blocks that become free when the plans in flight are back."""
        self.retiring: list[int] = []
        """Handles that the next plan finishes."""
        self.beam_searches: dict[RequestId, Request] = {}
        """Those that run here."""
        self.constrained: dict[int, Sequence] = {}
        """Rows of constrained sequences."""
        self.blocked: tuple[Sequence, int] | None = None
        """The waiting sequence that last found too few free blocks, and how many there were."""
        self._free_rows = list(range(self.table.limit.size))
        self._next_op_id = 1
        self._vocab_size = config.vocab_size

    # -- what fits ----------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return self.table.num_active

    @property
    def num_seats(self) -> int:
        """Sequences that may start; a beam search keeps a seat for each of its beams."""
        num_kept = sum(
            not seq.is_running
            for request in self.beam_searches.values()
            for seq in request.sequences
        )
        return min(self.max_num_seqs - self.num_running - num_kept, len(self._free_rows))

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, is swapped or on its way."""
        return not (self.num_running or self.swapped or self.in_flight)

    def can_ever_hold(self, new: NewRequest, num_tokens: int) -> bool:
        """Whether a sequence of `new`, or all its beams, with so many known tokens could compute
        them alone in the pool."""
        return new.num_beams <= self.max_num_seqs and num_tokens <= self.most_computed(new)

    def limit_of(self, new: NewRequest) -> int:
        """Most tokens that a sequence of `new` can come to here: its own limit, or the whole pool
        computed and one more sampled."""
        return min(len(new.prompt_token_ids) + new.max_tokens, self.most_computed(new) + 1)

    def most_computed(self, new: NewRequest) -> int:
        """Tokens that a sequence, or each beam, can compute alone in the pool. Of beams, the full
        blocks of the prompt are shared for certain:

            | prompt's full blocks | beam 0 .... | beam 1 .... | ... |
        """
        num_shared = len(new.prompt_token_ids) // self.kv.block_size if new.num_beams > 1 else 0
        num_own = (self.kv.pool.num_blocks - num_shared) // new.num_beams
        return (num_shared + num_own) * self.kv.block_size if num_own > 0 else 0

    # -- ways in and out ----------------------------------------------------------------------

    def start(self, seq: Sequence, match: PrefixMatch) -> None:
        """Run `seq` from the blocks of `match`; there must be a seat and blocks."""
        self.kv.start(seq, match)
        self._enter_row(seq)
        new = seq.request.new
        limit = self.limit_of(new)
        if new.beam is not None:
            search = BeamSearch(new.beam, new.end_ids, limit - seq.num_prompt_tokens)
            count = min(num_candidates(new.num_beams, len(new.end_ids)), self._vocab_size)
            seq.request.beams = BeamGroup(search, count)
            self.beam_searches[seq.request.id] = seq.request
            limit = seq.num_prompt_tokens
        if seq.constraint is not None:
            self.constrained[seq.row] = seq
            limit = len(seq.token_ids) + 1
        self.table.add(seq, seq.row, match.num_tokens, limit)
        self.blocked = None

    def fork(self, seq: Sequence, source: Sequence) -> int:
        """Run `seq` as a copy of the beam `source`; gives the block for its next token. One must
        be free."""
        block = self.kv.fork(seq, source, int(self.table.num_computed[source.row]))
        self._enter_row(seq)
        self.table.add_fork(seq, seq.row, source.row)
        return block

    def _enter_row(self, seq: Sequence) -> None:
        seq.go(SequenceState.RUNNING)
        seq.replica = self.id
        seq.row = heapq.heappop(self._free_rows)
        seq.num_deferrals = 0
        seq.leaders.clear()

    def leave(
        self, seq: Sequence, state: SequenceState, last_record: StepRecord | None = None
    ) -> None:
        """A running sequence goes to `state`; its blocks are free once the last plan that names
        them is back: `last_record`, or the last in flight that computes its row.

        What it generated is published now: sooner it would be of use to hardly anybody, and would
        cost every step. The token sampled last is not computed, all before it are. Of an unsound
        request nothing is published, and what was is forgotten."""
        seq.go(state)
        row = seq.row
        has_generated = self.table.num_tokens[row] > self.table.num_started[row]
        self.table.remove(row)
        self.constrained.pop(row, None)
        if seq.request.is_unsound:
            self.kv.forget(seq.block_table)
        elif has_generated:
            self.kv.publish(seq, len(seq.token_ids) - 1)
        blocks = self.kv.leave(seq)
        for record in self.in_flight:
            record.left[row] = LeftRow(seq, blocks)
        self.retiring.append(row)
        seq.replica, seq.row = None, -1
        if seq.request.beams is not None:
            self._leave_beams(seq.request)
        last = last_record or self.last_record(row)
        if last is None:
            self.kv.free(blocks)
        else:
            self.defer(last, blocks)

    def _leave_beams(self, request: Request) -> None:
        """The search is lost when the last of its beams leaves."""
        if not any(seq.is_running for seq in request.sequences):
            del self.beam_searches[request.id]
            request.beams = None

    def leave_swapped(self, seq: Sequence, state: SequenceState) -> None:
        """A swapped sequence goes to `state` without its host blocks."""
        seq.go(state)
        self.swapped.remove(seq)
        seq.replica = None
        record = self.record_of(seq.swap_step)
        if record is None:
            self.kv.free_host(seq.host_blocks)
        else:
            record.host_blocks.append(seq.host_blocks)
        seq.host_blocks = []

    def void(self, at_step: int) -> list[Sequence]:
        """The worker forgets everything after `at_step`: no plan is in flight any more, and every
        sequence goes back to waiting. Gives these; published blocks stay."""
        while self.in_flight:
            self.settle(self.in_flight.popleft())
        returned = [*self.table, *self.swapped]
        for seq in list(self.table):
            self.leave(seq, SequenceState.WAITING)
        for seq in list(self.swapped):
            self.leave_swapped(seq, SequenceState.WAITING)
        self.retiring.clear()
        self._free_rows = list(range(self.table.limit.size))
        self.base_step = at_step
        self.must_reset = True
        return returned

    # -- plans --------------------------------------------------------------------------------

    def record_of(self, step: int) -> StepRecord | None:
        """The plan of `step`, if it is in flight."""
        return next((record for record in self.in_flight if record.step == step), None)

    def last_record(self, row: int) -> StepRecord | None:
        """The last plan in flight that computes `row`."""
        return next((record for record in reversed(self.in_flight) if record.names(row)), None)

    def defer(self, record: StepRecord, blocks: list[int]) -> None:
        """Drop the references of `blocks` when the plan of `record` is back."""
        record.blocks.append(blocks)
        self.num_deferred_blocks += len(blocks)

    def enter(self, record: StepRecord) -> None:
        """The plan of `record` is made."""
        self.in_flight.append(record)
        self.last_step = self.base_step = record.step
        self.must_reset = False

    def settle(self, record: StepRecord) -> None:
        """A plan is back, or void: what waited for it is freed."""
        for blocks in record.blocks:
            self.num_deferred_blocks -= len(blocks)
            self.kv.free(blocks)
        for blocks in record.host_blocks:
            self.kv.free_host(blocks)

    def retire_handles(self) -> list[int]:
        """The handles that the plan being made finishes; free for the plans after it."""
        handles, self.retiring = self.retiring, []
        return handles

    def free_handles(self, handles: list[int]) -> None:
        """The plan that finishes `handles` is made."""
        for handle in handles:
            heapq.heappush(self._free_rows, handle)

    def free_handle_list(self) -> list[int]:
        """The free handles in no order; for checks."""
        return list(self._free_rows)

    def next_op_id(self) -> int:
        op_id = self._next_op_id
        self._next_op_id += 1
        return op_id
