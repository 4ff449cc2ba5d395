"""The blocks of one replica: pools, prefix index, and each running sequence's table.

The facade over BlockPool and PrefixIndex. It knows tokens and blocks; when to allocate, whom to
preempt and what to send is the planner's business.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.prefix_index import BlockHasher, Parent, PrefixIndex, token_bytes
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
        self.index = PrefixIndex()
        self._hasher = hasher
        self._is_caching = enable_prefix_cache

    @property
    def num_pool_tokens(self) -> int:
        """Token slots of the whole device pool."""
        return self.pool.num_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self.block_size)

    # -- prefixes -----------------------------------------------------------------------------

    def find_prefix(self, seq: Sequence) -> PrefixMatch:
        """The longest unbroken chain of published blocks that `seq`, not running, starts with.
        It leaves at least one token to compute."""
        match = PrefixMatch(parent=seq.salt)
        if not self._is_caching:
            return match
        for number in range((len(seq.token_ids) - 1) // self.block_size):
            tokens = self._tokens_of(seq, number)
            entry = self.index.find(self._digest(seq, number, tokens), match.parent, tokens)
            if entry is None:
                break
            match.blocks.append(entry.block)
            match.parent = entry.serial
        match.num_published = len(match.blocks)
        match.num_tokens = match.num_published * self.block_size
        return match

    def fork_prefix(self, seq: Sequence, sibling: Sequence, num_computed: int) -> PrefixMatch:
        """What `seq` can share of a running sibling that has computed `num_computed` tokens: the
        prompt's full blocks by reference, and the filled slots of the next block by a copy."""
        num_tokens = min(num_computed, seq.num_prompt_tokens, len(seq.token_ids) - 1)
        num_full, num_rest = divmod(num_tokens, self.block_size)
        return PrefixMatch(
            blocks=sibling.block_table[:num_full],
            num_tokens=num_tokens,
            parent=seq.salt,
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
        seq.block_table = list(match.blocks)
        seq.num_published_blocks = match.num_published
        seq.parent = match.parent
        num_new = self.num_blocks_for(len(seq.token_ids)) - len(match.blocks)
        seq.block_table += self._take(num_new)

    def grow(self, sequences: SequenceOf[Sequence]) -> list[int]:
        """One more block at the end of each table; gives these blocks. So many must be free."""
        blocks = self._take(len(sequences))
        for seq, block in zip(sequences, blocks, strict=True):
            seq.block_table.append(block)
        return blocks

    def _take(self, count: int) -> list[int]:
        blocks = self.pool.take(count)
        for block in blocks:
            self.index.remove(block)
        return blocks

    # -- content ------------------------------------------------------------------------------

    def publish(self, seq: Sequence, num_computed: int) -> None:
        """Make the full blocks of the first `num_computed` tokens findable. The results of the
        steps that computed them are back, and `seq.token_ids` holds them."""
        if not self._is_caching:
            return
        for number in range(seq.num_published_blocks, num_computed // self.block_size):
            self._publish_next(seq, self._tokens_of(seq, number))

    def publish_last(self, seq: Sequence, tokens: bytes) -> None:
        """The same for all of `seq.token_ids`, whose last block has `tokens`."""
        num_blocks = len(seq.token_ids) // self.block_size
        if self._is_caching and seq.num_published_blocks == num_blocks - 1:
            self._publish_next(seq, tokens)
        else:
            self.publish(seq, num_blocks * self.block_size)

    def _publish_next(self, seq: Sequence, tokens: bytes) -> None:
        number = seq.num_published_blocks
        digest = self._digest(seq, number, tokens)
        entry = self.index.publish(seq.block_table[number], digest, seq.parent, tokens)
        seq.parent = entry.serial
        seq.num_published_blocks = number + 1

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

    def _tokens_of(self, seq: Sequence, number: int) -> bytes:
        start = number * self.block_size
        return token_bytes(seq.token_ids[start : start + self.block_size])

    def _digest(self, seq: Sequence, number: int, tokens: bytes) -> bytes:
        """The digest of full block `number`, which has `tokens`; kept with the sequence, for any
        replica of this block size."""
        if seq.digest_block_size != self.block_size:
            seq.digests.clear()
            seq.digest_block_size = self.block_size
        digests = seq.digests
        for missing in range(len(digests), number):
            digests.append(self._next_digest(seq, self._tokens_of(seq, missing)))
        if len(digests) == number:
            digests.append(self._next_digest(seq, tokens))
        return digests[number]

    def _next_digest(self, seq: Sequence, tokens: bytes) -> bytes:
        parent = seq.digests[-1] if seq.digests else self._hasher.root(seq.salt)
        return self._hasher.digest(parent, tokens)
