"""Which block holds the keys and values of which prefix, on one replica.

A block's digest is a keyed BLAKE2b over its parent's digest and its token ids; the first block's
parent is the digest of the cache salt. The key is drawn at start-up, so that nobody can make two
prefixes meet. Even so a digest only finds the candidate: an entry stands for a prefix if its
tokens are the same and its parent is the very entry that matched before.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

DIGEST_BYTES = 16

Parent = int | bytes
"""What comes before a block: the serial number of an entry, or the salt for a first block."""


class BlockHasher:
    """Chains digests over the full blocks of a sequence."""

    def __init__(self, key: bytes) -> None:
        """`key` has 1 to 64 secret random bytes."""
        self._key = key
        self._keyed = hashlib.blake2b(digest_size=DIGEST_BYTES, key=key)

    def root(self, salt: bytes) -> bytes:
        """The parent digest of a first block."""
        return hashlib.blake2b(salt, key=self._key, person=b"salt").digest()

    def digest(self, parent: bytes, tokens: bytes) -> bytes:
        """The digest of a block of `tokens` (see token_bytes) after `parent`."""
        state = self._keyed.copy()  # spares the work of the key
        state.update(parent + tokens)
        return state.digest()


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids, each below 2**32, as bytes that are equal for equal lists alone."""
    return array("I", token_ids).tobytes()


class IndexEntry(NamedTuple):
    """A published block."""

    block: int
    digest: bytes
    parent: Parent
    tokens: bytes
    serial: int
    """Names this content in its children; never used again."""


class PrefixIndex:
    """Published blocks by digest, at most one for each digest.

    An entry whose parent has left can't be reached any more. Blocks are freed from the end of a
    table and taken in that order, so that children leave before their parents.
    """

    def __init__(self) -> None:
        self._by_digest: dict[bytes, IndexEntry] = {}
        self._by_block: dict[int, IndexEntry] = {}
        self._next_serial = 0

    def __len__(self) -> int:
        return len(self._by_block)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def find(self, digest: bytes, parent: Parent, tokens: bytes) -> IndexEntry | None:
        """The entry for exactly these tokens after exactly this parent."""
        entry = self._by_digest.get(digest)
        if entry is None or entry.parent != parent or entry.tokens != tokens:
            return None
        return entry

    def publish(self, block: int, digest: bytes, parent: Parent, tokens: bytes) -> IndexEntry:
        """Make `block`, which is complete, findable; gives the entry that stands for the content
        now. An entry for the same content stays, be it this block's or another's; one of other
        content under the same digest leaves, since its prefix may be out of reach."""
        known = self._by_digest.get(digest)
        if known is not None:
            if known.parent == parent and known.tokens == tokens:
                return known
            self.remove(known.block)
        if block in self._by_block:
            self.remove(block)
        entry = IndexEntry(block, digest, parent, tokens, self._next_serial)
        self._next_serial += 1
        self._by_digest[digest] = entry
        self._by_block[block] = entry
        return entry

    def remove(self, block: int) -> None:
        """Forget `block`, if it is published: its content is about to change."""
        entry = self._by_block.pop(block, None)
        if entry is not None:
            del self._by_digest[entry.digest]

    def clear(self) -> int:
        """Forget everything; gives how many entries there were."""
        num_entries = len(self._by_block)
        self._by_digest.clear()
        self._by_block.clear()
        return num_entries

    def entries(self) -> list[IndexEntry]:
        """All entries; for checks."""
        return list(self._by_block.values())
