"""Makes the next step plan of one replica.

There are no phases: each running sequence has `num_total - num_computed` tokens to compute, and a
step takes what the token budget allows. In this order:

1. Decodes, one token each. One at the end of its last block gets a block; when none is free,
   sequences later in the policy's order are preempted for it, and without such it skips the step.
2. Chunks of running sequences that have several tokens to compute.
3. Unless blocks ran short: swapped sequences return, then waiting ones start, in order. A sequence
   that doesn't fit holds up those behind it, so that none is passed over for ever.

Counts of rows change only in `_commit`: until then they are as of the plans before.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence as SequenceOf

import numpy as np

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.counters import Counters
from scheduler_svc.core.kv_cache_manager import PrefixMatch
from scheduler_svc.core.placement import Placement, may_take
from scheduler_svc.core.preemption import choose_victim, should_swap
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Sequence
from scheduler_svc.core.sequence_table import Bools, Ints
from scheduler_svc.core.states import SequenceState
from scheduler_svc.core.step_draft import StepDraft
from scheduler_svc.core.waiting_queue import WaitingQueue
from shared.plan import SequenceStart, StepPlan

ADMISSION_WINDOW = 256
"""How many waiting sequences one step looks at."""


class StepPlanner:
    """Plans one step of `replica`; made for it and thrown away."""

    def __init__(
        self,
        replica: Replica,
        replicas: SequenceOf[Replica],
        waiting: WaitingQueue,
        config: SchedulerConfig,
        counters: Counters,
    ) -> None:
        """`replicas` are all members, `replica` included."""
        self.started: list[tuple[Sequence, int]] = []
        """Sequences that this plan starts for the first time, with their cached tokens."""
        self._replica = replica
        self._replicas = replicas
        self._waiting = waiting
        self._config = config
        self._counters = counters
        self._draft = StepDraft(replica.last_step + 1)
        self._prefill_budget = replica.token_budget
        self._has_decodes = False
        self._num_stalled = 0
        self._has_preempted = False

    def plan(self) -> StepPlan | None:
        """The plan, entered as in flight; None when there is nothing to do."""
        table = self._replica.table
        decoding = table.decoding()
        self._grow_tables(decoding)
        decode_rows = np.flatnonzero(decoding)
        self._set_budgets(decode_rows.size)
        self._continue_prefills()
        if not self._num_stalled and not self._has_preempted and self._resume_swapped():
            self._start_waiting()
        return self._commit(decode_rows)

    # -- decodes ------------------------------------------------------------------------------

    def _grow_tables(self, decoding: Bools) -> None:
        """Give each decoding row the slot for its token, or clear it in `decoding`."""
        table = self._replica.table
        top = decoding.size
        is_full = table.num_computed[:top] >= table.capacity[:top]
        rows = np.flatnonzero(decoding & is_full)
        if rows.size <= self._replica.kv.pool.num_free:
            self._grow(rows.tolist())
            return
        for row in sorted(rows.tolist(), key=lambda row: table.sequence(row).key):
            if not decoding[row]:
                continue  # preempted for one before it
            if self._make_room(table.sequence(row), decoding):
                self._grow([row])
            else:
                decoding[row] = False
                self._num_stalled += 1

    def _grow(self, rows: list[int]) -> None:
        if rows:
            table = self._replica.table
            blocks = self._replica.kv.grow([table.sequence(row) for row in rows])
            table.capacity[rows] += table.block_size
            self._draft.append(rows, blocks)

    def _make_room(self, seq: Sequence, decoding: Bools) -> bool:
        """Whether a free block is there for `seq`. Victims' blocks that plans in flight still
        name come later: as long as these suffice for all that wait, nobody else is preempted."""
        replica = self._replica
        while not replica.kv.pool.num_free:
            if self._num_stalled < replica.num_deferred_blocks:
                return False
            victim = choose_victim(replica, after=seq.key)
            if victim is None:
                return False
            decoding[victim.row] = False
            self._preempt(victim)
        return True

    def _preempt(self, victim: Sequence) -> None:
        """Take the blocks of `victim`, by copying or dropping their content."""
        table = self._replica.table
        row = victim.row
        # Tokens sampled in flight are drawn again later, so their slots are of no use.
        num_tokens = int(min(table.num_computed[row], table.num_tokens[row] - 1))
        victim.num_preemptions += 1
        self._counters.preemptions += 1
        self._has_preempted = True
        if should_swap(self._replica, self._config.preemption_mode, num_tokens):
            self._swap_out(victim, num_tokens)
        else:
            self._replica.leave(victim, SequenceState.WAITING)
            self._waiting.add(victim)

    def _swap_out(self, victim: Sequence, num_tokens: int) -> None:
        replica = self._replica
        kv = replica.kv
        for record in replica.in_flight:
            record.swapped[victim.row] = victim
        host_blocks = kv.host_pool.take(kv.num_blocks_for(num_tokens))
        self._draft.swap_out(victim.block_table[: len(host_blocks)], host_blocks)
        replica.leave(victim, SequenceState.SWAPPED, self._draft.record)
        victim.replica = replica.id
        victim.host_blocks = host_blocks
        victim.num_swapped_tokens = num_tokens
        victim.swap_step = self._draft.record.step
        insort(replica.swapped, victim, key=lambda seq: seq.key)
        self._counters.swaps_out += 1

    # -- prompts ------------------------------------------------------------------------------

    def _set_budgets(self, num_decodes: int) -> None:
        """Decodes come first; beside them prompts may take only so much of the step's time."""
        self._has_decodes = num_decodes > 0
        self._prefill_budget = self._replica.token_budget - num_decodes
        rate = self._replica.capacity.prefill_tokens_per_s
        if self._has_decodes and rate:
            most = max(1, int(rate * self._config.prefill_step_s))
            self._prefill_budget = min(self._prefill_budget, most)

    def _continue_prefills(self) -> None:
        table = self._replica.table
        sequences = [table.sequence(row) for row in table.prefilling().tolist()]
        for seq in sorted(sequences, key=lambda seq: seq.key):
            if self._prefill_budget <= 0:
                return
            self._compute(seq)

    def _compute(self, seq: Sequence) -> None:
        """Plan as much of the tokens that `seq` has to compute as the budget allows."""
        table = self._replica.table
        depth = int(table.num_computed[seq.row])
        remaining = int(table.num_total[seq.row]) - depth
        if self._has_decodes:
            parity = self._config.attention_parity_tokens
            num_new = min(remaining, chunk_tokens(depth, self._prefill_budget, parity))
            self._prefill_budget -= chunk_cost(depth, num_new, parity)
        else:
            num_new = min(remaining, self._prefill_budget)
            self._prefill_budget -= num_new
        self._draft.compute(seq.row, depth + num_new, num_new, samples=num_new == remaining)
        if depth + num_new >= seq.num_prompt_tokens - 1:
            # All that siblings can share; its last token may come by the way of decodes.
            self._waiting.release_held(seq.request)

    # -- ways in ------------------------------------------------------------------------------

    @property
    def _has_opening(self) -> bool:
        return self._prefill_budget > 0 and self._replica.has_seat

    @property
    def _reserve(self) -> int:
        """Blocks that stay free for running sequences to grow into."""
        replica = self._replica
        share = int(self._config.reserve_fraction * replica.kv.pool.num_blocks)
        return share if replica.num_running else 0

    def _resume_swapped(self) -> bool:
        """Bring swapped sequences back; whether all are."""
        replica = self._replica
        while replica.swapped:
            seq = replica.swapped[0]
            match = PrefixMatch(num_tokens=seq.num_swapped_tokens, parent=seq.salt)
            if not self._has_opening or not replica.kv.can_start(seq, match, self._reserve):
                return False
            replica.swapped.pop(0)
            host_blocks, seq.host_blocks = seq.host_blocks, []
            self._start(seq, match)
            self._draft.swap_in(host_blocks, seq.block_table[: len(host_blocks)])
            self._draft.record.host_blocks.append(host_blocks)
        return True

    def _start_waiting(self) -> None:
        replica = self._replica
        if not self._has_opening or not len(self._waiting):
            return
        placement = Placement(replica, self._replicas)
        for seq in self._waiting.head(ADMISSION_WINDOW):
            if not self._has_opening:
                return
            if not may_take(replica, seq, self._replicas):
                continue
            match = self._find_match(seq)
            if match is None:
                continue
            if not placement.is_best_here(seq, len(seq.token_ids) - match.num_tokens):
                continue
            if not replica.kv.can_start(seq, match, self._reserve):
                return
            self._waiting.remove(seq)
            self._counters.prefix_lookup_tokens += len(seq.token_ids)
            self._counters.prefix_hit_tokens += match.num_tokens
            if not seq.request.is_started:
                seq.request.is_started = True
                self.started.append((seq, match.num_tokens))
            self._start(seq, match)

    def _find_match(self, seq: Sequence) -> PrefixMatch | None:
        """What `seq` can start with here; None while a sibling here computes their prompt."""
        match = self._replica.kv.find_prefix(seq)
        if len(seq.request.sequences) == 1:
            return match
        table = self._replica.table
        for sibling in seq.request.sequences:
            if not sibling.is_running or sibling.replica != self._replica.id:
                continue
            num_computed = int(table.num_computed[sibling.row])
            if sibling.row in self._draft.start_rows or num_computed < seq.num_prompt_tokens - 1:
                return None
            forked = self._replica.kv.fork_prefix(seq, sibling, num_computed)
            return max(match, forked, key=lambda found: found.num_tokens)
        return match

    def _start(self, seq: Sequence, match: PrefixMatch) -> None:
        """Run `seq`, given whole, and compute what the budget allows."""
        replica = self._replica
        token_ids = tuple(seq.token_ids)
        replica.start(seq, match)
        if match.copy_source is not None:
            # Copied when the plan runs: until it is back the block must not change.
            replica.kv.pool.share(match.copy_source)
            replica.defer(self._draft.record, [match.copy_source])
            self._draft.copy(match.copy_source, seq.block_table[len(match.blocks)])
        self._draft.start(
            SequenceStart(
                handle=seq.row,
                token_ids=token_ids,
                num_prompt_tokens=seq.num_prompt_tokens,
                num_computed_tokens=match.num_tokens,
                block_table=tuple(seq.block_table),
                sampling=seq.request.new.sampling,
                sequence_index=seq.index,
            )
        )
        self._compute(seq)

    # -- the plan -----------------------------------------------------------------------------

    def _commit(self, decode_rows: Ints) -> StepPlan | None:
        """Enter the draft as the plan in flight."""
        replica, draft = self._replica, self._draft
        if not (decode_rows.size or draft.has_work or replica.retiring):
            return None
        finished = replica.retire_handles()
        plan = draft.finish(
            decode_rows,
            base_step=replica.base_step,
            reset=replica.must_reset,
            finished_handles=finished,
            next_op_id=replica.next_op_id,
        )
        draft.fill_record(decode_rows, replica.table)
        replica.enter(draft.record)
        replica.free_handles(finished)
        return plan


def chunk_cost(depth: int, num_new: int, parity: int) -> int:
    """Work of `num_new` tokens after `depth` others, in tokens at depth 0, rounded up: a token
    costs 1 and 1 / `parity` more for each token before it."""
    return math.ceil(num_new * (1 + (depth + num_new / 2) / parity))


def chunk_tokens(depth: int, budget: int, parity: int) -> int:
    """The most tokens, at least 1, whose chunk_cost is about `budget`; never more than that."""
    reach = parity + depth
    return max(1, min(budget, int(math.sqrt(reach * reach + 2 * parity * budget) - reach)))
