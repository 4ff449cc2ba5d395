"""The prefix index: exact matches alone, whatever the digests say."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.prefix_index import BlockHasher, Parent, PrefixIndex, token_bytes

A, B = token_bytes([1, 2]), token_bytes([3, 4])


def test_a_digest_depends_on_key_parent_and_tokens() -> None:
    """FIELD-FAILURES, part 4: predictable prefix hashes."""
    hasher = BlockHasher(b"one")
    root = hasher.root(b"")
    digests = [
        *hasher.chain(root, A + B, len(A)),
        *hasher.chain(root, B + A, len(A)),
        *hasher.chain(hasher.root(b"x"), A, len(A)),
        *BlockHasher(b"two").chain(root, A, len(A)),
    ]
    assert len(set(digests)) == len(digests) == 6
    assert hasher.chain(digests[0], B, len(B)) == digests[1:2]
    assert digests[:2] == BlockHasher(b"one").chain(root, A + B, len(A))


def test_a_block_is_found_by_its_tokens_after_its_parent_alone() -> None:
    """FIELD-FAILURES, part 1: a hash collision hands over another request's KV."""
    index = PrefixIndex(4)
    parent = index.publish(0, b"d", b"salt", A)
    child = index.publish(1, b"e", parent, B)
    assert index.find(b"d", b"salt", A) is parent
    assert index.find(b"e", parent, B) is child
    assert index.find(b"d", b"salt", B) is None
    assert index.find(b"d", b"other", A) is None
    assert index.find(b"e", b"salt", B) is None


def test_the_first_block_of_a_content_stays() -> None:
    index = PrefixIndex(4)
    first = index.publish(0, b"d", b"", A)
    assert index.publish(1, b"d", b"", A) is first
    assert 0 in index
    assert 1 not in index


def test_other_content_under_the_same_digest_displaces() -> None:
    index = PrefixIndex(4)
    index.publish(0, b"d", b"", A)
    index.publish(1, b"d", b"", B)
    assert 0 not in index
    assert index.find(b"d", b"", A) is None
    assert index.find(b"d", b"", B) is not None
    assert len(index) == 1


def test_a_child_is_reached_again_once_its_parent_is_computed_again() -> None:
    index = PrefixIndex(4)
    parent = index.publish(0, b"d", b"", A)
    child = index.publish(1, b"e", parent, B)
    index.release(child)
    index.remove(0)
    assert index.find(b"d", b"", A) is None
    again = index.publish(2, b"d", b"", A)
    assert index.find(b"e", again, B) is child


def test_a_child_of_displaced_content_stays_out_of_reach() -> None:
    """FIELD-FAILURES, part 1: a hash collision hands over another request's KV."""
    index = PrefixIndex(4)
    parent = index.publish(0, b"d", b"", A)
    index.publish(1, b"e", parent, B)
    other = index.publish(2, b"d", b"", B)
    assert index.find(b"e", other, B) is None


def test_an_entry_leaves_with_its_block_and_all_that_comes_after_it() -> None:
    index = PrefixIndex(4)
    parent = index.publish(0, b"d", b"", A)
    child = index.publish(1, b"e", parent, B)
    index.remove(0)
    assert index.entries() == [parent, child]
    index.remove(1)
    assert index.entries() == [parent, child], "a sequence goes on after the child"
    index.release(child)
    assert index.entries() == []


def test_removing_a_block_without_entry_is_nothing() -> None:
    index = PrefixIndex(4)
    index.remove(3)
    index.publish(0, b"d", b"", A)
    assert index.clear() == 1
    assert index.find(b"d", b"", A) is None
    assert len(index) == 0


def test_token_ids_beyond_32_bits_are_no_tokens() -> None:
    with pytest.raises(OverflowError):
        token_bytes([1 << 32])


class IndexWorld:
    """Sequences of one-token blocks that publish, and whose blocks are taken again."""

    def __init__(self, num_digests: int) -> None:
        self.num_digests = num_digests
        self.index = PrefixIndex(6)
        self.content: dict[int, str] = {}
        """What a published block holds: all tokens up to its own."""

    def digest(self, prefix: str) -> bytes:
        number = int.from_bytes(hashlib.sha256(prefix.encode()).digest()[:4])
        return bytes([number % self.num_digests]) if self.num_digests else prefix.encode()

    def take(self, block: int) -> None:
        self.index.remove(block)
        self.content.pop(block, None)

    def run(self, text: str, blocks: list[int]) -> None:
        """A sequence computes `text` into `blocks`, publishes them in order, and leaves."""
        cursor: Parent = b""
        for block in blocks[: len(text)]:
            self.take(block)
        for number, block in zip(range(len(text)), blocks, strict=False):
            prefix = text[: number + 1]
            entry = self.index.publish(block, self.digest(prefix), cursor, text[number].encode())
            self.content = {b: held for b, held in self.content.items() if b in self.index}
            if entry.block == block:
                self.content[block] = prefix
            cursor = entry
        self.index.release(cursor)

    def walk(self, text: str) -> list[int]:
        """The blocks of the longest published prefix of `text`."""
        blocks: list[int] = []
        parent: Parent = b""
        for number, token in enumerate(text):
            entry = self.index.find(self.digest(text[: number + 1]), parent, token.encode())
            if entry is None or entry.block is None:
                break
            blocks.append(entry.block)
            parent = entry
        return blocks


TEXTS = st.text("ab", min_size=1, max_size=4)
ACTIONS = st.lists(st.tuples(TEXTS, st.permutations(range(6)), st.booleans()), max_size=12)


@settings(derandomize=True, deadline=None)
@given(ACTIONS, TEXTS, st.sampled_from((0, 1, 2, 5)))
def test_whatever_was_published_and_taken_only_the_same_prefix_is_found(
    actions: list[tuple[str, list[int], bool]], text: str, num_digests: int
) -> None:
    """FIELD-FAILURES, part 1: a hash collision hands over another request's KV. With few digests
    there are misses; with one for each prefix (0) all that is there is found."""
    world = IndexWorld(num_digests)
    for words, blocks, is_run in actions:
        if is_run:
            world.run(words, blocks)
        else:
            world.take(blocks[0])
        found = world.walk(text)
        assert [world.content[block] for block in found] == [
            text[: number + 1] for number in range(len(found))
        ]
        if num_digests == 0 and len(found) < len(text):
            assert text[: len(found) + 1] not in world.content.values()
    world.index.clear()
    assert world.index.entries() == []
