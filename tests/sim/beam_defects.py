"""Planted defects of beam searches: how they fork, share blocks, give candidates and leave."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from scheduler_svc.core import scheduler as scheduler_module
from scheduler_svc.core.beam_group import BeamGroup
from scheduler_svc.core.beam_growth import BeamGrowth
from scheduler_svc.core.beam_results import apply_candidates
from scheduler_svc.core.kv_cache_manager import KVCacheManager, PrefixMatch
from scheduler_svc.core.messages import Event
from scheduler_svc.core.replica import Replica, StepRecord
from scheduler_svc.core.request import Request, Sequence
from scheduler_svc.core.step_draft import StepDraft
from scheduler_svc.core.waiting_queue import WaitingQueue
from shared.plan import StepResult


def share_a_beams_open_block(patch: pytest.MonkeyPatch) -> None:
    """A forked beam goes on in its parent's partly filled block."""
    real = KVCacheManager.fork

    def fork(self: KVCacheManager, seq: Sequence, source: Sequence, num_computed: int) -> int:
        if num_computed % self.block_size == 0:
            return real(self, seq, source, num_computed)
        real(self, seq, source, num_computed - num_computed % self.block_size)
        own = seq.block_table.pop()
        self.free([own])
        shared = source.block_table[num_computed // self.block_size]
        self.pool.share(shared)
        seq.block_table.append(shared)
        return shared

    patch.setattr(KVCacheManager, "fork", fork)
    patch.setattr(StepDraft, "copy", lambda self, source, target: None)


def publish_a_beams_prompt_early(patch: pytest.MonkeyPatch) -> None:
    """The prompt of a search is findable before the step that computes it is back."""
    real = Replica.start

    def start(self: Replica, seq: Sequence, match: PrefixMatch) -> None:
        real(self, seq, match)
        if seq.request.beams is not None:
            self.kv.publish(seq, len(seq.token_ids))

    patch.setattr(Replica, "start", start)


def give_candidates_to_the_wrong_rows(patch: pytest.MonkeyPatch) -> None:
    """Beams of a step get each other's candidates."""

    def apply(
        replica: Replica, record: StepRecord, result: StepResult, waiting: WaitingQueue
    ) -> Iterator[tuple[Request, list[Event]]]:
        found = result.candidates
        turned = [*found[1:], *found[:1]]
        mixed = [
            dataclasses.replace(other, handle=one.handle)
            for one, other in zip(found, turned, strict=True)
        ]
        result = dataclasses.replace(result, candidates=mixed)
        return apply_candidates(replica, record, result, waiting)

    patch.setattr(scheduler_module, "apply_candidates", apply)


def free_a_forks_blocks_twice(patch: pytest.MonkeyPatch) -> None:
    """A beam that leaves drops a second reference of a block that it shares."""
    real = KVCacheManager.leave

    def leave(self: KVCacheManager, seq: Sequence) -> list[int]:
        is_fork = seq.request.new.beam is not None and seq.index > 0
        blocks = real(self, seq)
        return [*blocks[:1], *blocks] if is_fork else blocks

    patch.setattr(KVCacheManager, "leave", leave)


def choose_for_the_parent(patch: pytest.MonkeyPatch) -> None:
    """The token of the first fork goes to the beam that it was forked from, and the other way."""
    real = BeamGroup.choose

    def choose(self: BeamGroup) -> list[int]:
        left = real(self)
        for at, one in enumerate(self.chosen):
            kept = next(
                (n for n, other in enumerate(self.chosen[:at]) if other.parent == one.parent), None
            )
            if one.is_fork and kept is not None:
                first = self.chosen[kept]
                self.chosen[kept] = dataclasses.replace(first, token_id=one.token_id)
                self.chosen[at] = dataclasses.replace(one, token_id=first.token_id)
                break
        return left

    patch.setattr(BeamGroup, "choose", choose)


def mix_up_the_ranks(patch: pytest.MonkeyPatch) -> None:
    """The search takes the best beam's candidates for the worst one's."""
    real = BeamGroup.go_on
    patch.setattr(BeamGroup, "go_on", lambda self, running: real(self, running[::-1]))


def lose_a_beams_append(patch: pytest.MonkeyPatch) -> None:
    """A beam that keeps its row at a block's end is given a block that nobody tells of."""
    real = BeamGrowth._keep

    def keep(self: BeamGrowth, seq: Sequence) -> Sequence:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(StepDraft, "append", lambda self, rows, blocks: None)
            return real(self, seq)

    patch.setattr(BeamGrowth, "_keep", keep)


def give_beams_seats_away(patch: pytest.MonkeyPatch) -> None:
    """A search that starts with one beam keeps no seats for the others."""

    def num_seats(self: Replica) -> int:
        return self.max_num_seqs - self.num_running

    patch.setattr(Replica, "num_seats", property(num_seats))


def forget_a_dropped_beam(patch: pytest.MonkeyPatch) -> None:
    """The blocks of a beam that nothing goes on from are not freed."""
    real = KVCacheManager.leave

    def leave(self: KVCacheManager, seq: Sequence) -> list[int]:
        beams = seq.request.beams
        blocks = real(self, seq)
        return [] if beams is not None and beams.chosen else blocks

    patch.setattr(KVCacheManager, "leave", leave)


BEAM_DEFECTS = (
    share_a_beams_open_block,
    publish_a_beams_prompt_early,
    give_candidates_to_the_wrong_rows,
    free_a_forks_blocks_twice,
    choose_for_the_parent,
    mix_up_the_ranks,
    lose_a_beams_append,
    give_beams_seats_away,
    forget_a_dropped_beam,
)
