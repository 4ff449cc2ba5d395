"""Random worlds keep every promise; and a planted defect is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from scheduler_svc.core.kv_cache_manager import KVCacheManager, PrefixMatch
from scheduler_svc.core.prefix_index import IndexEntry, Parent, PrefixIndex
from scheduler_svc.core.request import Sequence
from scheduler_svc.core.sequence_table import SequenceTable
from scheduler_svc.core.step_draft import StepDraft
from tests.sim.simulator import Simulator

NUM_EVENTS = 300


@pytest.mark.parametrize("seed", range(100))
def test_a_random_world_keeps_every_promise(seed: int) -> None:
    """FIELD-FAILURES, part 1: fuzz 500 steps. Replay: python -m tests.sim --seed SEED"""
    Simulator(seed).run(NUM_EVENTS)


def find_by_digest_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any published block passes for any other at its depth."""

    def find(self: PrefixIndex, digest: bytes, parent: Parent, tokens: bytes) -> IndexEntry | None:
        return next((entry for entry in self.entries() if entry.parent == parent), None)

    monkeypatch.setattr(PrefixIndex, "find", find)


def skip_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork writes to a block that was never filled."""
    monkeypatch.setattr(StepDraft, "copy", lambda self, source, target: None)


def share_open_block(monkeypatch: pytest.MonkeyPatch) -> None:
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

    monkeypatch.setattr(KVCacheManager, "fork_prefix", fork)


def publish_one_block_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is findable before all its slots are filled."""
    real = KVCacheManager.publish

    def publish(self: KVCacheManager, seq: Sequence, num_computed: int) -> None:
        real(self, seq, min(num_computed + self.block_size, len(seq.token_ids)))

    monkeypatch.setattr(KVCacheManager, "publish", publish)


def forget_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Late results go to whoever has the row now."""
    real = SequenceTable.remove

    def remove(self: SequenceTable, row: int) -> None:
        real(self, row)
        self.generation[row] -= 1

    monkeypatch.setattr(SequenceTable, "remove", remove)


def leak_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block of a table is never freed."""
    real = KVCacheManager.free

    def free(self: KVCacheManager, blocks: Iterable[int]) -> None:
        real(self, list(blocks)[:-1])

    monkeypatch.setattr(KVCacheManager, "free", free)


def skip_swaps_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence comes back from the host pool without its content."""
    monkeypatch.setattr(StepDraft, "swap_in", lambda self, host_blocks, device_blocks: None)


def keep_host_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A swapped sequence that ends keeps its host blocks."""
    monkeypatch.setattr(KVCacheManager, "free_host", lambda self, blocks: None)


DEFECTS = (
    find_by_digest_of_nothing,
    skip_copies,
    share_open_block,
    publish_one_block_too_many,
    forget_generations,
    leak_blocks,
    skip_swaps_in,
    keep_host_blocks,
)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_planted_defect_is_seen(
    defect: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    defect(monkeypatch)
    for seed in range(40):
        try:
            Simulator(seed).run(NUM_EVENTS)
        except (AssertionError, KeyError, ValueError, IndexError):
            return
    pytest.fail("40 seeds saw nothing")
