"""One lane of the waiting queue: sequences in the order of their keys, with prompt tokens summed.

Sorted in chunks, each with its sums, so that a place in a lane of 100,000 is found, and the tokens
before it are counted, by looking at some hundred sums and one chunk.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from scheduler_svc.core.policy import OrderKey
from scheduler_svc.core.request import Sequence

MAX_CHUNK_SIZE = 512
"""A chunk that has grown larger is halved."""


class Ahead(NamedTuple):
    """What waits before a place."""

    num_sequences: int
    num_tokens: int
    """Of their prompts."""


Entry = tuple[OrderKey, Sequence]


class Lane:
    """Keys are unique. There is no empty chunk."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """Prompt tokens of all that wait here."""
        self._chunks: list[list[Entry]] = []
        self._last_keys: list[OrderKey] = []  # of each chunk
        self._chunk_tokens: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __iter__(self) -> Iterator[Sequence]:
        """In order; the lane must not change meanwhile."""
        return (seq for _, seq in self.entries())

    def entries(self) -> Iterator[Entry]:
        """Sequences with their keys, in order; the lane must not change meanwhile."""
        return chain.from_iterable(self._chunks)

    def __contains__(self, seq: Sequence) -> bool:
        number = bisect_left(self._last_keys, seq.key)
        if number == len(self._chunks):
            return False
        chunk = self._chunks[number]
        return chunk[bisect_left(chunk, (seq.key,))][1] is seq

    def before(self, key: OrderKey) -> Ahead:
        """What waits before the place of `key`."""
        number = bisect_left(self._last_keys, key)
        num_sequences = sum(map(len, self._chunks[:number]))
        num_tokens = sum(self._chunk_tokens[:number])
        if number < len(self._chunks):
            chunk = self._chunks[number]
            at = bisect_left(chunk, (key,))
            num_sequences += at
            num_tokens += sum(seq.num_prompt_tokens for _, seq in chunk[:at])
        return Ahead(num_sequences, num_tokens)

    def insert(self, seq: Sequence) -> None:
        """`seq` waits here."""
        number = min(bisect_left(self._last_keys, seq.key), len(self._chunks) - 1)
        if number < 0:
            number = 0
            self._chunks.append([])
            self._last_keys.append(seq.key)
            self._chunk_tokens.append(0)
        chunk = self._chunks[number]
        insort(chunk, (seq.key, seq))
        self._last_keys[number] = chunk[-1][0]
        self._count(number, seq.num_prompt_tokens)
        if len(chunk) > MAX_CHUNK_SIZE:
            self._halve(number)

    def remove(self, seq: Sequence) -> None:
        """`seq`, which waits here, does so no longer."""
        number = bisect_left(self._last_keys, seq.key)
        chunk = self._chunks[number]
        del chunk[bisect_left(chunk, (seq.key,))]
        self._count(number, -seq.num_prompt_tokens)
        if chunk:
            self._last_keys[number] = chunk[-1][0]
        else:
            del self._chunks[number], self._last_keys[number], self._chunk_tokens[number]

    def _count(self, number: int, num_tokens: int) -> None:
        self._chunk_tokens[number] += num_tokens
        self.num_tokens += num_tokens

    def _halve(self, number: int) -> None:
        chunk = self._chunks[number]
        upper = chunk[len(chunk) // 2 :]
        del chunk[len(chunk) // 2 :]
        num_upper_tokens = sum(seq.num_prompt_tokens for _, seq in upper)
        self._chunks.insert(number + 1, upper)
        self._last_keys.insert(number, chunk[-1][0])
        self._chunk_tokens[number] -= num_upper_tokens
        self._chunk_tokens.insert(number + 1, num_upper_tokens)
