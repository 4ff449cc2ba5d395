"""Makes the next step plan of one replica.

There are no phases: each running sequence has `num_total - num_computed` tokens to compute, and a
step takes what the token budget allows. In this order:

1. Decodes, one token each. One at the end of its last block gets a block; when none is free,
   sequences later in the policy's order are preempted for it, and without such it skips the step.
2. Chunks of running sequences that have several tokens to compute. Beside decodes they take no
   more time than the target between tokens leaves, by the replica's measured costs.
3. Unless blocks ran short: swapped sequences return, then waiting ones start, in order. A sequence
   that doesn't fit holds up those behind it, so that none is passed over for ever.

Counts of rows change only in `_commit`: until then they are as of the plans before.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.counters import Counters
from scheduler_svc.core.kv_cache_manager import PrefixMatch
from scheduler_svc.core.placement import Placement, may_take
from scheduler_svc.core.replica import PromptPlaces, Replica
from scheduler_svc.core.request import Sequence
from scheduler_svc.core.sequence_table import Ints
from scheduler_svc.core.step_budget import StepBudget
from scheduler_svc.core.step_cost import StepWork
from scheduler_svc.core.step_draft import NO_ROWS, StepDraft
from scheduler_svc.core.story import Stories
from scheduler_svc.core.table_growth import TableGrowth
from scheduler_svc.core.waiting_queue import WaitingQueue
from shared.plan import SequenceStart, StepPlan

ADMISSION_WINDOW = 256
"""How many waiting sequences one step looks at."""
LEARNING_INTERVAL = 16
"""Pure decode steps are alike: the cost model learns from one in so many."""


class StepPlanner:
    """Plans one step of `replica`; made for it and thrown away."""

    def __init__(
        self,
        replica: Replica,
        replicas: SequenceOf[Replica],
        waiting: WaitingQueue,
        config: SchedulerConfig,
        counters: Counters,
        stories: Stories,
    ) -> None:
        """`replicas` are all members, `replica` included."""
        self.started: list[tuple[Sequence, int]] = []
        """Sequences that this plan starts for the first time, with their cached tokens."""
        self._replica = replica
        self._replicas = replicas
        self._waiting = waiting
        self._config = config
        self._counters = counters
        self._stories = stories
        self._draft = StepDraft(replica.last_step + 1)
        self._budget = StepBudget(replica, config.target_itl_s)
        self._decodes: Ints = NO_ROWS

    def plan(self) -> StepPlan | None:
        """The plan, entered as in flight; None when there is nothing to do."""
        growth = TableGrowth(
            self._replica,
            self._waiting,
            self._config,
            self._counters,
            self._draft,
            self._stories,
        )
        self._decodes = growth.decode_rows()
        self._budget.take_decodes(self._decodes, self._draft.num_beams)
        self._continue_prefills()
        if not growth.is_short and self._resume_swapped():
            self._start_waiting()
        return self._commit()

    # -- prompts ------------------------------------------------------------------------------

    def _continue_prefills(self) -> None:
        table = self._replica.table
        if self._decodes.size == table.num_active:
            return
        sequences = table.sequences(table.prefilling())
        for request in self._replica.beam_searches.values():
            # The last token of a prompt is a decode for others; the row of a beam never decodes.
            first = request.sequences[0]
            if first.is_running and table.num_total[first.row] - table.num_computed[first.row] == 1:
                sequences.append(first)
        for seq in sorted(sequences, key=lambda seq: seq.key):
            if not self._budget.has_room:
                return
            self._compute(seq)

    def _compute(self, seq: Sequence) -> None:
        """Plan as much of the tokens that `seq` has to compute as the budget allows."""
        table = self._replica.table
        depth = int(table.num_computed[seq.row])
        remaining = int(table.num_total[seq.row]) - depth
        num_new = self._budget.take_chunk(depth, remaining)
        end, is_all = depth + num_new, num_new == remaining
        self._note_chunk(seq, num_new, is_last=is_all)
        if seq.owes_scores:
            self._score_prompt(seq, depth, end)
        if seq.request.beams is not None:
            self._draft.compute_prompt(seq.row, end, num_new, gives=is_all)
            return
        self._draft.compute(seq.row, end, num_new, samples=is_all)
        if depth + num_new >= seq.num_prompt_tokens - 1:
            # All that siblings can share; its last token may come by the way of decodes.
            self._waiting.release_held(seq.request)

    def _score_prompt(self, seq: Sequence, depth: int, end: int) -> None:
        """Have the places told that computing the tokens from `depth` to `end` tells of."""
        first = max(depth + 1, seq.num_scored)
        last = min(end, seq.num_prompt_tokens - 1)
        num_top = seq.request.new.num_prompt_logprobs
        if first <= last and num_top is not None:
            self._draft.score_prompt(seq.row, PromptPlaces(first, last + 1, num_top))

    def _note_chunk(self, seq: Sequence, num_new: int, *, is_last: bool) -> None:
        """The story tells of a prompt's chunks once, when the last one is planned."""
        sizes = seq.chunk_sizes
        if sizes or not is_last:
            sizes.append(num_new)
        if sizes and is_last:
            self._stories.note(
                seq,
                f"computes {sum(sizes)} tokens in {len(sizes)} chunks of {min(sizes)} to "
                f"{max(sizes)}, the last in step {self._draft.record.step}",
            )
            sizes.clear()

    def _work(self) -> StepWork | None:
        """What the cost model is to learn from; None for a step like many others, and for one
        that scores prompts, which costs more."""
        if self._draft.record.prompt_places:
            return None
        if not self._draft.record.chunk_rows and self._draft.record.step % LEARNING_INTERVAL:
            return None
        return self._budget.work()

    # -- ways in ------------------------------------------------------------------------------

    @property
    def _has_opening(self) -> bool:
        return self._budget.has_room and self._replica.num_seats > 0

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
            match = PrefixMatch(num_tokens=seq.num_swapped_tokens, parent=seq.namespace)
            if not self._has_opening or not replica.kv.can_start(seq, match, self._reserve):
                return False
            replica.swapped.pop(0)
            host_blocks, seq.host_blocks = seq.host_blocks, []
            self._start(seq, match)
            self._draft.swap_in(host_blocks, seq.block_table[: len(host_blocks)])
            self._draft.record.host_blocks.append(host_blocks)
            self._stories.note(
                seq,
                f"resumes on replica {replica.id} in step {self._draft.record.step}: "
                f"{len(host_blocks)} blocks come back from the host",
            )
        return True

    def _start_waiting(self) -> None:
        replica = self._replica
        if not len(self._waiting) or not self._has_opening:
            return
        placement = Placement(replica, self._replicas)
        for seq in self._waiting.head(ADMISSION_WINDOW):
            if not self._has_opening:
                return
            if not may_take(replica, seq, self._replicas):
                continue
            if self._is_still_blocked(seq) or self._replica.num_seats < seq.request.new.num_beams:
                return
            if self._is_led(seq):
                continue
            match = self._find_match(seq)
            if match is None or self._will_be_led(seq, match):
                continue
            if not placement.is_best_here(seq, len(seq.token_ids) - match.num_tokens):
                if seq.num_deferrals == 1:
                    text = f"replica {replica.id} leaves it to another, where it costs less time"
                    self._stories.note(seq, text)
                continue
            if not replica.kv.can_start(seq, match, self._reserve):
                self._block(seq, match)
                return
            self._waiting.start(seq, len(seq.token_ids) - match.num_tokens)
            self._stories.note(
                seq,
                f"runs on replica {replica.id} from step {self._draft.record.step}: "
                f"{match.num_tokens} of {len(seq.token_ids)} tokens cached",
            )
            self._counters.prefix_lookup_tokens += len(seq.token_ids)
            self._counters.prefix_hit_tokens += match.num_tokens
            if not seq.request.is_started:
                seq.request.is_started = True
                self.started.append((seq, match.num_tokens))
            self._start(seq, match)

    def _block(self, seq: Sequence, match: PrefixMatch) -> None:
        """`seq` waits for blocks here, and what is behind it with it."""
        replica = self._replica
        if replica.blocked is None or replica.blocked[0] is not seq:
            num_needed = replica.kv.num_blocks_for(len(seq.token_ids)) - len(match.blocks)
            self._stories.note(
                seq,
                f"waits for blocks on replica {replica.id}: {num_needed} and a reserve of "
                f"{self._reserve} are needed, {replica.kv.pool.num_free} are free",
            )
        replica.blocked = (seq, replica.kv.pool.num_free)

    def _is_still_blocked(self, seq: Sequence) -> bool:
        """Whether blocks were too few for `seq` before and no more are free now: spares the look
        into the prefix index at every step of a full replica."""
        replica = self._replica
        if replica.blocked is None:
            return False
        blocked, num_free = replica.blocked
        return seq is blocked and replica.kv.pool.num_free <= num_free

    def _is_led(self, seq: Sequence) -> bool:
        """Whether somebody here still computes what `seq` waits to share, as found before."""
        leader, num_blocks = seq.leaders.get(self._replica.id, (None, 0))
        return (
            leader is not None
            and leader.is_running
            and leader.replica == self._replica.id
            and leader.num_published_blocks < num_blocks
        )

    def _will_be_led(self, seq: Sequence, match: PrefixMatch) -> bool:
        """Let `seq` wait for blocks that another sequence here computes. That one stands before it
        in the order, so that nobody waits for one that has to wait itself, and its chunks come
        before those of `seq` in any case: computing them again would not be sooner."""
        leader = match.leader
        if leader is None or leader.key > seq.key:
            return False
        seq.leaders[self._replica.id] = (leader, match.num_led_blocks)
        return True

    def _find_match(self, seq: Sequence) -> PrefixMatch | None:
        """What `seq` can start with here; None while a sibling here computes their prompt."""
        match = self._replica.kv.find_prefix(seq)
        if len(seq.request.sequences) == 1 or seq.owes_scores:
            return match
        table = self._replica.table
        for sibling in seq.request.sequences:
            if not sibling.is_running or sibling.replica != self._replica.id:
                continue
            num_computed = int(table.num_computed[sibling.row])
            if sibling.row in self._draft.start_rows or num_computed < seq.num_prompt_tokens - 1:
                return None
            forked = self._replica.kv.fork_prefix(seq, sibling, num_computed)
            match.leader = None
            return max(match, forked, key=lambda found: found.num_tokens)
        return match

    def _start(self, seq: Sequence, match: PrefixMatch) -> None:
        """Run `seq`, given whole, and compute what the budget allows."""
        replica, new = self._replica, seq.request.new
        token_ids = tuple(seq.token_ids)
        replica.start(seq, match)
        if match.copy_source is not None:
            # Copied when the plan runs: until it is back the block must not change.
            replica.kv.pool.share(match.copy_source)
            replica.defer(self._draft.record, [match.copy_source])
            self._draft.copy(match.copy_source, seq.block_table[len(match.blocks)])
        beams = seq.request.beams
        self._draft.start(
            SequenceStart(
                handle=seq.row,
                token_ids=token_ids,
                num_prompt_tokens=seq.num_prompt_tokens,
                num_computed_tokens=match.num_tokens,
                block_table=tuple(seq.block_table),
                sampling=new.sampling,
                sequence_index=new.first_choice + seq.index,
                num_candidates=0 if beams is None else beams.num_candidates,
                num_prompt_logprobs=new.num_prompt_logprobs if seq.owes_scores else None,
                first_prompt_logprob=seq.num_scored if seq.owes_scores else 0,
            )
        )
        self._compute(seq)

    # -- the plan -----------------------------------------------------------------------------

    def _commit(self) -> StepPlan | None:
        """Enter the draft as the plan in flight."""
        replica, draft, decode_rows = self._replica, self._draft, self._decodes
        if not (decode_rows.size or draft.has_work or replica.retiring):
            return None
        draft.record.work = self._work()
        finished = replica.retire_handles()
        plan = draft.finish(
            decode_rows,
            replica.constrained,
            base_step=replica.base_step,
            reset=replica.must_reset,
            finished_handles=finished,
            next_op_id=replica.next_op_id,
        )
        draft.fill_record(decode_rows, replica.table)
        replica.enter(draft.record)
        replica.free_handles(finished)
        return plan
