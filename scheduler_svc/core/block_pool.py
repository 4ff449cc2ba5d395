"""A pool of blocks: who is in use, how often, and which free one is taken next."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt


class BlockPool:
    """Reference counts and a free list in the order of last use; O(1) for each block.

    The free list is doubly linked through two arrays, with a sentinel at index `num_blocks`:

        sentinel <-> taken next: empty or longest unused ... most lately freed <-> sentinel

    A freed block keeps its content until it is taken, which is what the prefix cache lives on.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._refs = array("i", bytes(num_blocks * array("i").itemsize))
        ring = num_blocks + 1
        self._next = [(block + 1) % ring for block in range(ring)]
        self._prev = [(block - 1) % ring for block in range(ring)]

    def ref_count(self, block: int) -> int:
        """How many tables and pending operations hold `block`; 0 is free."""
        return self._refs[block]

    def is_free(self) -> npt.NDArray[np.bool_]:
        """[num_blocks] Whether each block is free."""
        return ~np.array(self._refs, np.bool_)

    def take(self, count: int) -> list[int]:
        """The `count` free blocks whose content is worth least, with one reference each."""
        assert count <= self.num_free, "too few free blocks: check num_free first"
        following, sentinel = self._next, self.num_blocks
        block = sentinel
        blocks = [block := following[block] for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        if blocks:
            rest = following[blocks[-1]]
            following[sentinel], self._prev[rest] = rest, sentinel
            self.num_free -= count
        return blocks

    def share(self, block: int) -> None:
        """One more reference; a free block leaves the free list with its content."""
        if self._refs[block] == 0:
            self._unlink(block)
        self._refs[block] += 1

    def release(self, block: int, *, keep_content: bool) -> None:
        """One reference less; the last one frees it, to be taken last if its content is worth
        keeping, else first. Releasing a free block is a defect and raises."""
        assert self._refs[block] > 0, f"block {block} is free already"
        self._refs[block] -= 1
        if self._refs[block] == 0:
            sentinel = self.num_blocks
            self._link(block, self._prev[sentinel] if keep_content else sentinel)

    def free_blocks(self) -> list[int]:
        """The free list from the block taken next to the one taken last; O(n), for checks."""
        blocks = []
        block = self._next[self.num_blocks]
        while block != self.num_blocks:
            blocks.append(block)
            assert len(blocks) <= self.num_blocks, "the free list is a loop"
            block = self._next[block]
        return blocks

    def _link(self, block: int, after: int) -> None:
        before = self._next[after]
        self._next[after] = self._prev[before] = block
        self._prev[block], self._next[block] = after, before
        self.num_free += 1

    def _unlink(self, block: int) -> None:
        after, before = self._prev[block], self._next[block]
        self._next[after] = before
        self._prev[before] = after
        self.num_free -= 1
