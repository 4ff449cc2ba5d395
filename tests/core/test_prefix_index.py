"""The prefix index: exact matches alone, whatever the digests say."""

from __future__ import annotations

import pytest

from scheduler_svc.core.prefix_index import BlockHasher, PrefixIndex, token_bytes

A, B = token_bytes([1, 2]), token_bytes([3, 4])


def test_a_digest_depends_on_key_parent_and_tokens() -> None:
    hasher = BlockHasher(b"one")
    root = hasher.root(b"")
    digests = {
        hasher.digest(root, A),
        hasher.digest(root, B),
        hasher.digest(hasher.root(b"x"), A),
        BlockHasher(b"two").digest(root, A),
    }
    assert len(digests) == 4
    assert hasher.digest(root, A) == BlockHasher(b"one").digest(root, A)


def test_a_block_is_found_by_its_tokens_after_its_parent_alone() -> None:
    """FIELD-FAILURES, part 1: a hash collision hands over another request's KV."""
    index = PrefixIndex()
    parent = index.publish(0, b"d", b"salt", A)
    child = index.publish(1, b"e", parent.serial, B)
    assert index.find(b"d", b"salt", A) is parent
    assert index.find(b"e", parent.serial, B) is child
    assert index.find(b"d", b"salt", B) is None
    assert index.find(b"d", b"other", A) is None
    assert index.find(b"e", b"salt", B) is None


def test_the_first_block_of_a_content_stays() -> None:
    index = PrefixIndex()
    first = index.publish(0, b"d", b"", A)
    assert index.publish(1, b"d", b"", A) is first
    assert 0 in index
    assert 1 not in index


def test_other_content_under_the_same_digest_displaces() -> None:
    index = PrefixIndex()
    index.publish(0, b"d", b"", A)
    index.publish(1, b"d", b"", B)
    assert 0 not in index
    assert index.find(b"d", b"", A) is None
    assert index.find(b"d", b"", B) is not None
    assert len(index) == 1


def test_a_child_is_out_of_reach_once_its_parent_was_replaced() -> None:
    index = PrefixIndex()
    parent = index.publish(0, b"d", b"", A)
    index.publish(1, b"e", parent.serial, B)
    index.remove(0)
    again = index.publish(2, b"d", b"", A)
    assert index.find(b"e", again.serial, B) is None


def test_removing_a_block_without_entry_is_nothing() -> None:
    index = PrefixIndex()
    index.remove(3)
    index.publish(0, b"d", b"", A)
    assert index.clear() == 1
    assert index.find(b"d", b"", A) is None
    assert len(index) == 0


def test_token_ids_beyond_32_bits_are_no_tokens() -> None:
    with pytest.raises(OverflowError):
        token_bytes([1 << 32])
