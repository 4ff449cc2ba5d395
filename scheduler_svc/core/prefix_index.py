"""Which block holds the keys and values of which prefix, on one replica.

A block's digest is a keyed BLAKE2b over its parent's digest and its token ids; the first block's
parent is the digest of adapter and cache salt. The key is drawn at start-up, so that nobody can
make two prefixes meet. Even so a digest only finds the candidate: an entry stands for a prefix if
its tokens are the same and its parent is the very entry that matched before.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

DIGEST_BYTES = 16


class BlockHasher:
    """Chains digests over the full blocks of a sequence: one BLAKE2b call for each block."""

    def __init__(self, key: bytes) -> None:
        """`key` has 1 to 64 secret random bytes.

        BLAKE2b pads its own key argument to a whole input block of 128 bytes. A key in front of
        the message is as good, since BLAKE2b marks its last block, and 32 bytes of it leave room
        for a digest and 16 tokens: each of our blocks takes one compression instead of two.
        """
        self._key = key
        secret = hashlib.blake2b(key=key, person=b"blocks", digest_size=32).digest()
        self._keyed = hashlib.blake2b(secret, digest_size=DIGEST_BYTES)

    def root(self, namespace: bytes) -> bytes:
        """The parent digest of a first block; see Sequence.namespace."""
        return hashlib.blake2b(
            namespace, key=self._key, person=b"root", digest_size=DIGEST_BYTES
        ).digest()

    def chain(self, parent: bytes, packed: bytes, width: int) -> list[bytes]:
        """The digests of the blocks in `packed` tokens (see token_bytes), `width` bytes each, of
        which the first comes after `parent`."""
        digests = []
        copy_keyed = self._keyed.copy
        for (block,) in struct.iter_unpack(f"{width}s", packed):
            state = copy_keyed()
            state.update(parent)
            state.update(block)
            parent = state.digest()
            digests.append(parent)
        return digests


def token_bytes(token_ids: Iterable[int]) -> bytes:
    """Token ids, each below 2**32, as bytes that are equal for equal lists alone."""
    return array("I", token_ids).tobytes()


class IndexEntry:
    """The content of one full block after one exact prefix, and the block that holds it."""

    __slots__ = ("block", "digest", "num_refs", "parent", "tokens")

    def __init__(self, digest: bytes, parent: Parent, tokens: bytes) -> None:
        self.block: int | None = None
        """None when the block was taken for something else."""
        self.digest = digest
        self.parent = parent
        self.tokens = tokens
        self.num_refs = 0
        """Entries that come after this one, and running sequences whose next block does."""


Parent = IndexEntry | bytes
"""What comes before a block: another block's entry, or the namespace for a first block."""


class PrefixIndex:
    """Published blocks by digest, at most one for each digest.

    Blocks are freed from the end of a table and taken in that order, so that children mostly leave
    before their parents. Where a parent's block is taken first, its entry stays without a block
    as long as something comes after it; once the same content is computed again the entry gets
    that block, and its children can be reached again. Such entries are at most the ancestors of
    published blocks and running sequences.
    """

    def __init__(self, num_blocks: int) -> None:
        self._by_digest: dict[bytes, IndexEntry] = {}
        self._by_block: list[IndexEntry | None] = [None] * num_blocks
        self._is_published = bytearray(num_blocks)  # 1 where _by_block has an entry
        self._num_published = 0

    def __len__(self) -> int:
        """How many blocks can be found."""
        return self._num_published

    def __contains__(self, block: int) -> bool:
        return self._by_block[block] is not None

    def is_published(self) -> npt.NDArray[np.bool_]:
        """[num_blocks] Whether each block can be found."""
        return np.array(self._is_published, np.bool_)

    def find(self, digest: bytes, parent: Parent, tokens: bytes) -> IndexEntry | None:
        """The entry, with a block, for exactly these tokens after exactly this parent."""
        entry = self._by_digest.get(digest)
        if entry is None or entry.block is None:
            return None
        return entry if entry.parent == parent and entry.tokens == tokens else None

    def publish(self, block: int, digest: bytes, parent: Parent, tokens: bytes) -> IndexEntry:
        """Make `block`, which is complete, findable; gives the entry that stands for the content
        now. An entry for the same content stays, be it this block's or another's; one of other
        content under the same digest leaves, since its prefix may be out of reach.

        The caller holds `parent`, and afterwards the entry in its place.
        """
        entry = self._by_digest.get(digest)
        if entry is not None:
            if entry.parent == parent and entry.tokens == tokens:
                if entry.block is None:
                    self._place(entry, block)
                entry.num_refs += 1
                if not isinstance(parent, bytes):
                    parent.num_refs -= 1  # `entry` comes after it, so it stays
                return entry
            self._displace(entry)
        # The parent loses the caller and gains a child.
        entry = self._by_digest[digest] = IndexEntry(digest, parent, tokens)
        entry.num_refs = 1
        self._place(entry, block)
        return entry

    def remove(self, block: int) -> None:
        """Forget `block`, if it is published: its content is about to change."""
        entry = self._by_block[block]
        if entry is not None:
            self._by_block[block] = entry.block = None
            self._is_published[block] = 0
            self._num_published -= 1
            self._prune(entry)

    def remove_all(self, blocks: Iterable[int]) -> None:
        """Forget those of `blocks` that are published."""
        by_block = self._by_block
        for block in blocks:
            if by_block[block] is not None:
                self.remove(block)

    def hold(self, parent: Parent) -> None:
        """A running sequence's next block comes after `parent`."""
        if not isinstance(parent, bytes):
            parent.num_refs += 1

    def release(self, parent: Parent) -> None:
        """The opposite of hold."""
        if not isinstance(parent, bytes):
            parent.num_refs -= 1
            self._prune(parent)

    def clear(self) -> int:
        """Forget every block; gives how many there were."""
        blocks = [block for block, entry in enumerate(self._by_block) if entry is not None]
        for block in blocks:
            self.remove(block)
        return len(blocks)

    def entries(self) -> list[IndexEntry]:
        """All entries, also those without a block; for checks."""
        return list(self._by_digest.values())

    def _place(self, entry: IndexEntry, block: int) -> None:
        entry.block = block
        if self._by_block[block] is not None:
            self.remove(block)
        self._by_block[block] = entry
        self._is_published[block] = 1
        self._num_published += 1

    def _displace(self, entry: IndexEntry) -> None:
        """What comes after `entry` can't be reached any more, and leaves as its blocks do."""
        del self._by_digest[entry.digest]
        if entry.block is not None:
            self.remove(entry.block)

    def _prune(self, entry: IndexEntry) -> None:
        """Forget `entry`, and what it came after, if neither block nor child needs it."""
        while entry.block is None and entry.num_refs == 0:
            if self._by_digest.get(entry.digest) is entry:
                del self._by_digest[entry.digest]
            if isinstance(entry.parent, bytes):
                return
            entry = entry.parent
            entry.num_refs -= 1
