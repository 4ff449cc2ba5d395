"""The block pool: order of reuse, reference counts, and no block freed twice."""

from __future__ import annotations

from random import Random

import pytest

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


@pytest.mark.parametrize("seed", range(5))
def test_the_free_list_behaves_like_a_plain_list(seed: int) -> None:
    rng = Random(seed)
    pool, free, held = BlockPool(9), list(range(9)), []
    for _ in range(400):
        action = rng.randrange(3)
        if action == 0:
            count = rng.randint(0, len(free))
            held += free[:count]
            assert pool.take(count) == free[:count]
            del free[:count]
        elif action == 1 and held:
            block, keep = held.pop(rng.randrange(len(held))), rng.random() < 0.5
            pool.release(block, keep_content=keep)
            if block not in held:
                free.insert(len(free) if keep else 0, block)
        elif action == 2:
            block = rng.randrange(9)
            pool.share(block)
            held.append(block)
            if block in free:
                free.remove(block)
        assert pool.free_blocks() == free
        assert pool.num_free == len(free)
