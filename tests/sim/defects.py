"""Planted defects: ways in which schedulers of this kind went wrong, each of which the simulator
has to see."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import pytest

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.kv_cache_manager import KVCacheManager, PrefixMatch
from scheduler_svc.core.planner import StepPlanner
from scheduler_svc.core.prefix_index import IndexEntry, Parent, PrefixIndex
from scheduler_svc.core.replica import Replica, StepRecord
from scheduler_svc.core.request import Sequence
from scheduler_svc.core.sequence_table import Bools, Ints, RowIndex, SequenceTable
from scheduler_svc.core.states import SequenceState
from scheduler_svc.core.step_draft import StepDraft
from scheduler_svc.core.table_growth import TableGrowth
from shared.plan import StepPlan
from tests.sim.constraint import SimConstraint

Defect = Callable[[pytest.MonkeyPatch], None]

# -- blocks -----------------------------------------------------------------------------------


def leak_blocks(patch: pytest.MonkeyPatch) -> None:
    """The last block of a table is never freed."""
    real = KVCacheManager.free

    def free(self: KVCacheManager, blocks: Iterable[int]) -> None:
        real(self, list(blocks)[:-1])

    patch.setattr(KVCacheManager, "free", free)


def free_twice(patch: pytest.MonkeyPatch) -> None:
    """The first block of a table loses two references."""
    real = KVCacheManager.free

    def free(self: KVCacheManager, blocks: Iterable[int]) -> None:
        table = list(blocks)
        real(self, table[:1] + table)

    patch.setattr(KVCacheManager, "free", free)


def reuse_blocks_early(patch: pytest.MonkeyPatch) -> None:
    """Blocks of a sequence that left are free although a plan in flight writes to them."""
    for name in ("record_of", "last_record"):
        patch.setattr(Replica, name, lambda self, number: None)


def lose_appends(patch: pytest.MonkeyPatch) -> None:
    """One block that a table grew by is not told to the worker."""
    real = StepDraft.append

    def append(self: StepDraft, rows: list[int], blocks: list[int]) -> None:
        real(self, rows[1:], blocks[1:])

    patch.setattr(StepDraft, "append", append)


def take_one_block_twice(patch: pytest.MonkeyPatch) -> None:
    """Two tables grow by the same block."""
    real = BlockPool.take

    def take(self: BlockPool, count: int) -> list[int]:
        blocks = real(self, count)
        return [*blocks[:-1], blocks[0]] if count > 1 else blocks

    patch.setattr(BlockPool, "take", take)


# -- prefixes ---------------------------------------------------------------------------------


def accept_collisions(patch: pytest.MonkeyPatch) -> None:
    """Any published block passes for any other at its depth."""

    def find(self: PrefixIndex, digest: bytes, parent: Parent, tokens: bytes) -> IndexEntry | None:
        return next(
            (entry for entry in self.entries() if entry.parent == parent and entry.block), None
        )

    patch.setattr(PrefixIndex, "find", find)


def publish_early(patch: pytest.MonkeyPatch) -> None:
    """A block is findable before all its slots are filled."""
    real = KVCacheManager.publish

    def publish(self: KVCacheManager, seq: Sequence, num_computed: int) -> None:
        real(self, seq, min(num_computed + self.block_size, len(seq.token_ids)))

    patch.setattr(KVCacheManager, "publish", publish)


def publish_when_planned(patch: pytest.MonkeyPatch) -> None:
    """A prompt's blocks are findable before the step that computes them is back."""
    real = KVCacheManager.start

    def start(self: KVCacheManager, seq: Sequence, match: PrefixMatch) -> None:
        real(self, seq, match)
        self.publish(seq, len(seq.token_ids))

    patch.setattr(KVCacheManager, "start", start)


def keep_taken_blocks_published(patch: pytest.MonkeyPatch) -> None:
    """A block is still found by its old content after it was taken."""
    patch.setattr(PrefixIndex, "remove_all", lambda self, blocks: None)


def keep_unsound_blocks_published(patch: pytest.MonkeyPatch) -> None:
    """A block is still found after a sequence failed that had it in its table."""
    patch.setattr(KVCacheManager, "forget", lambda self, blocks: None)


def wait_for_ever_for_a_leader(patch: pytest.MonkeyPatch) -> None:
    """Who waited for a prefix once goes on waiting."""
    patch.setattr(StepPlanner, "_is_led", lambda self, seq: bool(seq.leaders))


# -- forks and swaps --------------------------------------------------------------------------


def skip_copies(patch: pytest.MonkeyPatch) -> None:
    """A fork writes to a block that was never filled."""
    patch.setattr(StepDraft, "copy", lambda self, source, target: None)


def share_open_block(patch: pytest.MonkeyPatch) -> None:
    """A fork writes into its sibling's block."""
    real = KVCacheManager.fork_prefix

    def fork(
        self: KVCacheManager, seq: Sequence, sibling: Sequence, num_computed: int
    ) -> PrefixMatch:
        match = real(self, seq, sibling, num_computed)
        if match.copy_source is not None:
            match.blocks = [*match.blocks, match.copy_source]
            match.copy_source = None
        return match

    patch.setattr(KVCacheManager, "fork_prefix", fork)


def share_what_the_step_computes(patch: pytest.MonkeyPatch) -> None:
    """A choice starts from blocks that a sibling, earlier in the plan, fills in the same step."""
    real = StepPlanner._find_match

    def find_match(self: StepPlanner, seq: Sequence) -> PrefixMatch | None:
        kv, record = self._replica.kv, self._draft.record
        ends = dict(zip(record.chunk_rows, record.chunk_ends, strict=True))
        for sibling in seq.request.sequences:
            if sibling.is_running and sibling.replica == self._replica.id:
                num_full = min(ends.get(sibling.row, 0), seq.num_prompt_tokens - 2) // kv.block_size
                if num_full > 0:
                    return kv.fork_prefix(seq, sibling, num_full * kv.block_size)
        return real(self, seq)

    patch.setattr(StepPlanner, "_find_match", find_match)


def skip_swaps_in(patch: pytest.MonkeyPatch) -> None:
    """A sequence comes back from the host pool without its content."""
    patch.setattr(StepDraft, "swap_in", lambda self, host_blocks, device_blocks: None)


def swap_out_tokens_in_flight(patch: pytest.MonkeyPatch) -> None:
    """A swapped sequence passes for as far as the plans in flight will bring it."""
    real = TableGrowth._swap_out

    def swap_out(self: TableGrowth, victim: Sequence, num_tokens: int) -> None:
        num_planned = int(self._replica.table.num_computed[victim.row])
        real(self, victim, num_tokens)
        victim.num_swapped_tokens = num_planned

    patch.setattr(TableGrowth, "_swap_out", swap_out)


def keep_host_blocks(patch: pytest.MonkeyPatch) -> None:
    """A swapped sequence that ends keeps its host blocks."""
    patch.setattr(KVCacheManager, "free_host", lambda self, blocks: None)


# -- plans and results ------------------------------------------------------------------------


def forget_who_left(patch: pytest.MonkeyPatch) -> None:
    """Late results, such as overshoot after an end, go to whoever has the row now."""
    real = Replica.leave

    def leave(
        self: Replica, seq: Sequence, state: SequenceState, last_record: StepRecord | None = None
    ) -> None:
        row = seq.row
        real(self, seq, state, last_record)
        for record in self.in_flight:
            del record.left[row]

    patch.setattr(Replica, "leave", leave)


def reuse_handles_early(patch: pytest.MonkeyPatch) -> None:
    """A handle is given anew before a plan has said that it is finished."""
    real = Replica.leave

    def leave(
        self: Replica, seq: Sequence, state: SequenceState, last_record: StepRecord | None = None
    ) -> None:
        real(self, seq, state, last_record)
        self.free_handles([self.retiring.pop()])

    patch.setattr(Replica, "leave", leave)


def overrun_the_budget(patch: pytest.MonkeyPatch) -> None:
    """A step computes more tokens than it may."""
    real = TableGrowth.decode_rows

    def decode_rows(self: TableGrowth) -> Ints:
        self._replica.token_budget += 1
        return real(self)

    patch.setattr(TableGrowth, "decode_rows", decode_rows)


def overrun_max_tokens(patch: pytest.MonkeyPatch) -> None:
    """A sequence ends a token late."""
    real = Replica.limit_of
    patch.setattr(Replica, "limit_of", lambda self, seq: real(self, seq) + 1)


def miss_stops(patch: pytest.MonkeyPatch) -> None:
    """Stop tokens that aren't the lowest one don't end a sequence."""

    def is_stop(self: SequenceTable, index: RowIndex, token_ids: Ints) -> Bools:
        hits: Bools = self._stop_ids[0, index] == token_ids
        return hits

    patch.setattr(SequenceTable, "is_stop", is_stop)


def lose_a_token_on_the_way_back(patch: pytest.MonkeyPatch) -> None:
    """A sequence that leaves its row forgets its last token."""
    real = SequenceTable.remove

    def remove(self: SequenceTable, row: int) -> None:
        seq = self.sequence(row)
        real(self, row)
        if len(seq.token_ids) > seq.num_prompt_tokens:
            seq.token_ids.pop()

    patch.setattr(SequenceTable, "remove", remove)


def plan_a_row_twice(patch: pytest.MonkeyPatch) -> None:
    """A sequence decodes twice in one step."""
    real = StepDraft.finish

    def finish(self: StepDraft, *args: object, **options: object) -> StepPlan:
        plan = real(self, *args, **options)  # type: ignore[arg-type]
        handles = [*plan.decode_handles, *plan.decode_handles[:1]]
        return dataclasses.replace(plan, decode_handles=handles)

    patch.setattr(StepDraft, "finish", finish)


# -- constraints ------------------------------------------------------------------------------


def mask_the_wrong_rows(patch: pytest.MonkeyPatch) -> None:
    """Two constrained sequences of a step get each other's mask."""
    real = StepDraft.finish

    def finish(self: StepDraft, *args: object, **options: object) -> StepPlan:
        plan = real(self, *args, **options)  # type: ignore[arg-type]
        return dataclasses.replace(plan, masks=list(reversed(plan.masks)))

    patch.setattr(StepDraft, "finish", finish)


def plan_with_stale_masks(patch: pytest.MonkeyPatch) -> None:
    """A constrained sequence decodes again before its last token is back."""
    real = SequenceTable.decoding

    def decoding(self: SequenceTable) -> Bools:
        rows = [seq.row for seq in self if seq.constraint is not None]
        self.limit[rows] += 1
        is_decoding = real(self)
        self.limit[rows] -= 1
        return is_decoding

    patch.setattr(SequenceTable, "decoding", decoding)


def share_a_constraint(patch: pytest.MonkeyPatch) -> None:
    """The choices of a request have one constraint's state between them."""
    patch.setattr(SimConstraint, "copy", lambda self: self)


def start_constraints_over(patch: pytest.MonkeyPatch) -> None:
    """A constraint starts over when its sequence is preempted or its replica lost."""
    real = Replica.leave

    def leave(
        self: Replica, seq: Sequence, state: SequenceState, last_record: StepRecord | None = None
    ) -> None:
        real(self, seq, state, last_record)
        if seq.constraint is not None and state is not SequenceState.FINISHED:
            assert seq.request.new.constraint is not None
            seq.constraint = seq.request.new.constraint.copy()

    patch.setattr(Replica, "leave", leave)


DEFECTS: tuple[Defect, ...] = (
    leak_blocks,
    free_twice,
    reuse_blocks_early,
    lose_appends,
    take_one_block_twice,
    accept_collisions,
    publish_early,
    publish_when_planned,
    keep_taken_blocks_published,
    keep_unsound_blocks_published,
    wait_for_ever_for_a_leader,
    skip_copies,
    share_open_block,
    share_what_the_step_computes,
    skip_swaps_in,
    swap_out_tokens_in_flight,
    keep_host_blocks,
    forget_who_left,
    reuse_handles_early,
    overrun_the_budget,
    overrun_max_tokens,
    miss_stops,
    lose_a_token_on_the_way_back,
    plan_a_row_twice,
    mask_the_wrong_rows,
    plan_with_stale_masks,
    share_a_constraint,
    start_constraints_over,
)
