"""Gives decoding sequences the blocks for their next tokens, at others' cost when none is free."""

from __future__ import annotations

from bisect import insort

from scheduler_svc.core.beam_growth import BeamGrowth, ready_searches
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.counters import Counters
from scheduler_svc.core.preemption import choose_victim, should_swap
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Request, Sequence
from scheduler_svc.core.sequence_table import Bools, Ints
from scheduler_svc.core.states import SequenceState
from scheduler_svc.core.step_draft import StepDraft
from scheduler_svc.core.story import Stories
from scheduler_svc.core.waiting_queue import WaitingQueue


class TableGrowth:
    """The decodes of one step, beams included. The first sequence in the policy's order always
    gets its block, or waits for one that a plan in flight still holds; so somebody gets on in any
    case. The last one in order skips the step rather than lose its cache."""

    def __init__(
        self,
        replica: Replica,
        waiting: WaitingQueue,
        config: SchedulerConfig,
        counters: Counters,
        draft: StepDraft,
        stories: Stories,
    ) -> None:
        self._replica = replica
        self._waiting = waiting
        self._config = config
        self._counters = counters
        self._draft = draft
        self._stories = stories
        self._num_stalled = 0
        self._has_preempted = False

    @property
    def is_short(self) -> bool:
        """Whether blocks did not suffice for all that run: nothing new may start."""
        return self._has_preempted or self._num_stalled > 0

    def decode_rows(self) -> Ints:
        """The rows that decode in this step, each with a slot for its token."""
        table = self._replica.table
        decoding = table.decoding()
        top = decoding.size
        is_full = table.num_computed[:top] >= table.capacity[:top]
        is_full &= decoding
        rows = is_full.nonzero()[0].tolist()
        searches = ready_searches(self._replica) if self._replica.beam_searches else []
        if len(rows) <= self._replica.kv.pool.num_free and not searches:
            self._grow(rows)
        else:
            self._grow_in_order(rows, searches, decoding)
        return decoding.nonzero()[0]

    def _grow_in_order(self, rows: list[int], searches: list[Request], decoding: Bools) -> None:
        table = self._replica.table
        sequences = [table.sequence(row) for row in rows]
        sequences += [request.sequences[-1] for request in searches]
        for seq in sorted(sequences, key=lambda seq: seq.key):
            if seq.request.new.beam is not None:
                self._go_on_with_beams(seq.request, decoding)
            elif not seq.is_running:
                continue  # preempted for one before it
            elif self._make_room(seq, 1, decoding):
                self._grow([seq.row])
            else:
                decoding[seq.row] = False
                self._num_stalled += 1

    def _go_on_with_beams(self, request: Request, decoding: Bools) -> None:
        if request.beams is None:
            return  # preempted for one before it
        growth = BeamGrowth(request, self._replica, self._waiting, self._draft)
        num_blocks = growth.num_blocks
        if self._make_room(request.sequences[-1], num_blocks, decoding):
            growth.go_on()
        else:
            self._num_stalled += num_blocks

    def _grow(self, rows: list[int]) -> None:
        if rows:
            table = self._replica.table
            blocks = self._replica.kv.grow(table.sequences(rows))
            table.capacity[rows] += table.block_size
            self._draft.append(rows, blocks)

    def _make_room(self, seq: Sequence, num_blocks: int, decoding: Bools) -> bool:
        """Whether so many free blocks are there for `seq`. Victims' blocks that
        plans in flight still name come later: as long as these suffice for all that wait, nobody
        else is preempted."""
        replica = self._replica
        while (num_missing := num_blocks - replica.kv.pool.num_free) > 0:
            if self._num_stalled + num_missing <= replica.num_deferred_blocks:
                return False
            victim = choose_victim(replica, after=seq.key)
            if victim is None:
                return False
            if victim.request.beams is not None:
                self._preempt_beams(victim.request, seq)
            else:
                decoding[victim.row] = False
                self._preempt(victim, seq)
        return True

    def _preempt_beams(self, request: Request, winner: Sequence) -> None:
        """Take the blocks of a whole beam search for `winner`; it begins again."""
        self._counters.preemptions += 1
        self._has_preempted = True
        winner_id = winner.request.id
        self._stories.note(request.sequences[0], f"gives its blocks to {winner_id}, and waits")
        for seq in request.sequences:
            seq.num_preemptions += 1
            if seq.is_running:
                self._replica.leave(seq, SequenceState.WAITING)
                self._waiting.add(seq)

    def _preempt(self, victim: Sequence, winner: Sequence) -> None:
        """Take the blocks of `victim` for `winner`, by copying or dropping their content."""
        table = self._replica.table
        row = victim.row
        # Tokens sampled in flight are drawn again later, so their slots are of no use.
        num_tokens = int(min(table.num_computed[row], table.num_tokens[row] - 1))
        victim.num_preemptions += 1
        self._counters.preemptions += 1
        self._has_preempted = True
        # What plans in flight tell of a prompt is lost with its row: it must be computed again.
        is_swap = not victim.owes_scores and should_swap(
            self._replica, self._config.preemption_mode, num_tokens
        )
        how = "swapped to the host" if is_swap else "dropped, to be computed again"
        self._stories.note(
            victim,
            f"preempted on replica {self._replica.id} in step {self._draft.record.step}: its "
            f"blocks go to {winner.request.id}; {num_tokens} tokens are {how}",
        )
        victim.chunk_sizes.clear()
        if is_swap:
            self._swap_out(victim, num_tokens)
        else:
            self._replica.leave(victim, SequenceState.WAITING)
            self._waiting.add(victim)

    def _swap_out(self, victim: Sequence, num_tokens: int) -> None:
        replica = self._replica
        kv = replica.kv
        host_blocks = kv.host_pool.take(kv.num_blocks_for(num_tokens))
        self._draft.swap_out(victim.block_table[: len(host_blocks)], host_blocks)
        replica.leave(victim, SequenceState.SWAPPED, self._draft.record)
        victim.replica = replica.id
        victim.host_blocks = host_blocks
        victim.num_swapped_tokens = num_tokens
        victim.swap_step = self._draft.record.step
        insort(replica.swapped, victim, key=lambda seq: seq.key)
        self._counters.swaps_out += 1
