"""The block pool: order of reuse, reference counts, and no block freed twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.block_pool import BlockPool


def test_blocks_without_content_go_first_and_cached_ones_by_last_use() -> None:
    pool = BlockPool(4)
    blocks = pool.take(4)
    for block, keep in zip(blocks, (True, False, True, True), strict=True):
        pool.release(block, keep_content=keep)
    assert pool.free_blocks() == [1, 0, 2, 3]
    pool.share(0)
    pool.release(0, keep_content=True)
    assert pool.take(4) == [1, 2, 3, 0]


def test_a_shared_block_is_free_after_its_last_release() -> None:
    pool = BlockPool(2)
    [block] = pool.take(1)
    pool.share(block)
    pool.release(block, keep_content=True)
    assert (pool.ref_count(block), pool.num_free) == (1, 1)
    pool.release(block, keep_content=True)
    assert (pool.ref_count(block), pool.num_free) == (0, 2)


def test_freeing_a_free_block_raises() -> None:
    """FIELD-FAILURES, part 1: blocks are freed once; freeing a free block raises."""
    pool = BlockPool(2)
    [block] = pool.take(1)
    pool.release(block, keep_content=False)
    with pytest.raises(AssertionError, match="free already"):
        pool.release(block, keep_content=False)


def test_taking_more_than_is_free_raises() -> None:
    pool = BlockPool(1)
    pool.take(1)
    with pytest.raises(AssertionError, match="too few free blocks"):
        pool.take(1)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(("take", "share", "release")), st.integers(0, 8))))
def test_the_free_list_behaves_like_a_plain_list(actions: list[tuple[str, int]]) -> None:
    """FIELD-FAILURES, part 1: blocks are freed once."""
    pool, free, held = BlockPool(9), list(range(9)), []
    for action, number in actions:
        if action == "take":
            count = min(number, len(free))
            assert pool.take(count) == free[:count]
            held += free[:count]
            del free[:count]
        elif action == "release" and held:
            block, keep = held.pop(number % len(held)), number % 2 == 0
            pool.release(block, keep_content=keep)
            if block not in held:
                free.insert(len(free) if keep else 0, block)
        elif action == "share":
            pool.share(number)
            held.append(number)
            if number in free:
                free.remove(number)
        assert pool.free_blocks() == free
        assert pool.num_free == len(free)
        assert [pool.ref_count(block) for block in range(9)] == [held.count(b) for b in range(9)]
        assert pool.is_free().tolist() == [block in free for block in range(9)]
