"""The blocks of one replica: pools, prefix index, and each running sequence's table.

The facade over BlockPool and PrefixIndex. It knows tokens and blocks; when to allocate, whom to
preempt and what to send is the planner's business.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.pending_prefixes import PendingPrefixes
from scheduler_svc.core.prefix_index import BlockHasher, Parent, PrefixIndex
from scheduler_svc.core.request import Sequence


@dataclass(slots=True)
class PrefixMatch:
    """Computed blocks that a sequence can start with; holds no references yet.

    0 ........... blocks ........... | .. first slots of copy_source .. | to compute ...
    |------------------------ num_tokens -------------------------------|
    """

    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_published: int = 0
    """How many of `blocks` were found in the index."""
    parent: Parent = b""
    """What the block after the published ones comes after."""
    copy_source: int | None = None
    """A sibling's partly shared block, to be copied before the sequence writes to it."""
    leader: Sequence | None = None
    """The running sequence that computes the block after `blocks`."""
    num_led_blocks: int = 0
    """Full blocks, `blocks` included, that are there once `leader` has published so many."""


class KVCacheManager:
    """Allocates, shares, publishes and frees the blocks of one replica."""

    def __init__(
        self,
        num_device_blocks: int,
        num_host_blocks: int,
        block_size: int,
        hasher: BlockHasher,
        *,
        enable_prefix_cache: bool,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_device_blocks)
        self.host_pool = BlockPool(num_host_blocks)
        self.index = PrefixIndex(num_device_blocks)
        self.pending = PendingPrefixes()
        self._hasher = hasher
        self._is_caching = enable_prefix_cache

    @property
    def num_pool_tokens(self) -> int:
        """Token slots of the whole device pool."""
        return self.pool.num_blocks * self.block_size

    @property
    def num_evictable(self) -> int:
        """Free blocks whose content can be found."""
        return int(np.count_nonzero(self.pool.is_free() & self.index.is_published()))

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self.block_size)

    # -- prefixes -----------------------------------------------------------------------------

    def find_prefix(self, seq: Sequence) -> PrefixMatch:
        """The longest unbroken chain of published blocks that `seq`, not running, starts with,
        and who computes the next ones. It leaves at least one token to compute, and all of a prompt
        that is to be scored."""
        match = PrefixMatch(parent=seq.namespace)
        if not self._is_cached(seq) or seq.owes_scores:
            return match
        num_usable = (len(seq.token_ids) - 1) // self.block_size
        packed, width = self._pack(seq, num_usable)
        digests = self._digests(seq, num_usable, packed)
        for number in range(num_usable):
            tokens = packed[number * width : (number + 1) * width]
            entry = self.index.find(digests[number], match.parent, tokens)
            if entry is None or entry.block is None:
                self._find_leader(match, digests[number:num_usable])
                break
            match.blocks.append(entry.block)
            match.parent = entry
        match.num_published = len(match.blocks)
        match.num_tokens = match.num_published * self.block_size
        return match

    def _find_leader(self, match: PrefixMatch, missing: SequenceOf[bytes]) -> None:
        """Note who computes the first of the `missing` blocks, and how many after it."""
        match.leader = leader = self.pending.leader(missing[0])
        match.num_led_blocks = len(match.blocks)
        if leader is not None:
            led = takewhile(lambda digest: self.pending.leader(digest) is leader, missing)
            match.num_led_blocks += len(list(led))

    def fork_prefix(self, seq: Sequence, sibling: Sequence, num_computed: int) -> PrefixMatch:
        """What `seq` can share of a running sibling that has computed `num_computed` tokens: the
        prompt's full blocks by reference, and the filled slots of the next block by a copy."""
        num_tokens = min(num_computed, seq.num_prompt_tokens, len(seq.token_ids) - 1)
        num_full, num_rest = divmod(num_tokens, self.block_size)
        return PrefixMatch(
            blocks=sibling.block_table[:num_full],
            num_tokens=num_tokens,
            parent=seq.namespace,
            copy_source=sibling.block_table[num_full] if num_rest else None,
        )

    def can_start(self, seq: Sequence, match: PrefixMatch, reserve: int) -> bool:
        """Whether blocks for all tokens of `seq` are there, and `reserve` remain."""
        num_new = self.num_blocks_for(len(seq.token_ids)) - len(match.blocks)
        num_revived = sum(self.pool.ref_count(block) == 0 for block in match.blocks)
        return num_new + num_revived + reserve <= self.pool.num_free

    def start(self, seq: Sequence, match: PrefixMatch) -> None:
        """Give `seq` a table for all its tokens that begins with `match`."""
        assert not seq.block_table
        for block in match.blocks:
            self.pool.share(block)
        self.index.hold(match.parent)
        seq.parent = match.parent
        seq.block_table = list(match.blocks)
        seq.num_published_blocks = match.num_published
        num_new = self.num_blocks_for(len(seq.token_ids)) - len(match.blocks)
        seq.block_table += self._take(num_new)
        if self._is_cached(seq):
            num_full = len(seq.token_ids) // self.block_size
            if num_full > match.num_published:
                digests = self._digests(seq, num_full, self._pack(seq, num_full)[0])
                self.pending.add(seq, digests[match.num_published : num_full])

    def leave(self, seq: Sequence) -> list[int]:
        """`seq` stops running and publishes nothing more; gives its table, whose references are
        the caller's now."""
        self.pending.discard(seq, seq.digests[seq.num_published_blocks :])
        self.index.release(seq.parent)
        blocks, seq.block_table, seq.parent = seq.block_table, [], seq.namespace
        return blocks

    def fork(self, seq: Sequence, source: Sequence, num_computed: int) -> int:
        """Give `seq` a table that shares the full blocks of the first `num_computed` tokens of
        `source` and ends with an own block for the next token; gives that block."""
        assert not seq.block_table
        seq.block_table = source.block_table[: num_computed // self.block_size]
        for block in seq.block_table:
            self.pool.share(block)
        seq.num_published_blocks, seq.parent = source.num_published_blocks, source.parent
        self.index.hold(seq.parent)
        [block] = self._take(1)
        seq.block_table.append(block)
        return block

    def grow(self, sequences: SequenceOf[Sequence]) -> list[int]:
        """One more block at the end of each table; gives these blocks. So many must be free."""
        blocks = self._take(len(sequences))
        for seq, block in zip(sequences, blocks, strict=True):
            seq.block_table.append(block)
        return blocks

    def _take(self, count: int) -> list[int]:
        blocks = self.pool.take(count)
        self.index.remove_all(blocks)
        return blocks

    # -- content ------------------------------------------------------------------------------

    def publish(self, seq: Sequence, num_computed: int) -> None:
        """Make the full blocks of the first `num_computed` tokens findable. The results of the
        steps that computed them are back, and `seq.token_ids` holds them."""
        first, end = seq.num_published_blocks, num_computed // self.block_size
        if first >= end or not self._is_cached(seq):
            return
        packed, width = self._pack(seq, end)
        digests = self._digests(seq, end, packed)
        for number in range(first, end):
            self._publish_next(seq, digests[number], packed[number * width : (number + 1) * width])
        if self.pending:
            self.pending.discard(seq, digests[first:end])

    def _publish_next(self, seq: Sequence, digest: bytes, tokens: bytes) -> None:
        number = seq.num_published_blocks
        seq.parent = self.index.publish(seq.block_table[number], digest, seq.parent, tokens)
        seq.num_published_blocks = number + 1

    def forget(self, blocks: Iterable[int]) -> None:
        """Nobody finds `blocks` any more, whose content is not to be trusted: all of a table, since
        it can't be told which of them a fault was in. Who shares them keeps them."""
        self.index.remove_all(blocks)

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each of a table's leading blocks; the last ones are reused
        first, as they are of use to the fewest prefixes."""
        for block in reversed(list(blocks)):
            self.pool.release(block, keep_content=block in self.index)

    def free_host(self, blocks: Iterable[int]) -> None:
        """Drop the references of a swapped sequence's host blocks."""
        for block in blocks:
            self.host_pool.release(block, keep_content=False)

    # -- digests ------------------------------------------------------------------------------

    def _is_cached(self, seq: Sequence) -> bool:
        return self._is_caching and seq.uses_prefix_cache

    def _pack(self, seq: Sequence, num_blocks: int) -> tuple[bytes, int]:
        """The tokens of the first `num_blocks` full blocks, and how many bytes a block has."""
        tokens = seq.token_ids[: num_blocks * self.block_size]
        return tokens.tobytes(), self.block_size * tokens.itemsize

    def _digests(self, seq: Sequence, count: int, packed: bytes) -> list[bytes]:
        """The digests of the first `count` full blocks at least, whose tokens are `packed`; kept
        with the sequence, for any replica of this block size."""
        if seq.digest_block_size != self.block_size:
            seq.digests.clear()
            seq.digest_block_size = self.block_size
        digests = seq.digests
        if len(digests) < count:
            width = len(packed) // count
            parent = digests[-1] if digests else self._hasher.root(seq.namespace)
            digests += self._hasher.chain(parent, packed[len(digests) * width :], width)
        return digests
