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

from collections.abc import Sequence as SequenceOf

from scheduler_svc.core.chunking import chunk_cost, chunk_tokens
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.counters import Counters
from scheduler_svc.core.kv_cache_manager import PrefixMatch
from scheduler_svc.core.placement import Placement, may_take
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Sequence
from scheduler_svc.core.sequence_table import Ints
from scheduler_svc.core.step_draft import StepDraft
from scheduler_svc.core.table_growth import TableGrowth
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

    def plan(self) -> StepPlan | None:
        """The plan, entered as in flight; None when there is nothing to do."""
        growth = TableGrowth(
            self._replica, self._waiting, self._config, self._counters, self._draft
        )
        decode_rows = growth.decode_rows()
        self._set_budgets(decode_rows.size)
        self._continue_prefills()
        if not growth.is_short and self._resume_swapped():
            self._start_waiting()
        return self._commit(decode_rows)

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
            if self._is_still_blocked(seq):
                return
            match = self._find_match(seq)
            if match is None:
                continue
            if not placement.is_best_here(seq, len(seq.token_ids) - match.num_tokens):
                continue
            if not replica.kv.can_start(seq, match, self._reserve):
                replica.blocked = (seq, replica.kv.pool.num_free)
                return
            self._waiting.remove(seq)
            self._counters.prefix_lookup_tokens += len(seq.token_ids)
            self._counters.prefix_hit_tokens += match.num_tokens
            if not seq.request.is_started:
                seq.request.is_started = True
                self.started.append((seq, match.num_tokens))
            self._start(seq, match)

    def _is_still_blocked(self, seq: Sequence) -> bool:
        """Whether blocks were too few for `seq` before and no more are free now: spares the look
        into the prefix index at every step of a full replica."""
        replica = self._replica
        if replica.blocked is None:
            return False
        blocked, num_free = replica.blocked
        return seq is blocked and replica.kv.pool.num_free <= num_free

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
                sequence_index=seq.request.new.first_choice + seq.index,
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
