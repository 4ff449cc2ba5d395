"""The sequences that wait for a replica, in the policy's order, within limits."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler_svc.core.policy import OrderKey
from scheduler_svc.core.request import Request, Sequence
from scheduler_svc.core.states import SequenceState


class WaitingQueue:
    """Sorted by order key, so that one that comes back stands where it stood before.

    Sequences that are held until their first sibling has computed the prompt count as waiting,
    but aren't in the order yet.
    """

    def __init__(self) -> None:
        self._items: list[tuple[OrderKey, Sequence]] = []
        self._num_held = 0
        self.num_tokens = 0
        """Prompt tokens of all that wait, held ones included."""

    def __len__(self) -> int:
        return len(self._items) + self._num_held

    def __iter__(self) -> Iterator[Sequence]:
        """In order, without the held ones; the queue must not change meanwhile."""
        return (seq for _, seq in self._items)

    def head(self, count: int) -> list[Sequence]:
        """The first `count` in order."""
        return [seq for _, seq in self._items[:count]]

    def add_request(self, request: Request) -> None:
        """A new request: its first sequence in order, the others held."""
        self.add(request.sequences[0])
        self._num_held += request.num_held
        self.num_tokens += request.num_held * request.num_prompt_tokens

    def add(self, seq: Sequence) -> None:
        assert seq.state is SequenceState.WAITING
        insort(self._items, (seq.key, seq))
        self.num_tokens += seq.num_prompt_tokens

    def remove(self, seq: Sequence) -> None:
        """Take `seq` out; it must be in the order."""
        at = bisect_left(self._items, (seq.key,))
        assert at < len(self._items) and self._items[at][1] is seq, "the sequence does not wait"
        del self._items[at]
        self.num_tokens -= seq.num_prompt_tokens

    def discard(self, seq: Sequence) -> None:
        """Take a waiting sequence out, whether it is held or in order."""
        request = seq.request
        if seq.index > 0 and request.num_held:
            request.num_held -= 1
            self._num_held -= 1
            self.num_tokens -= request.num_prompt_tokens
        else:
            self.remove(seq)

    def release_held(self, request: Request) -> None:
        """The first sequence has computed the prompt: the others join the order."""
        if not request.num_held:
            return
        self._num_held -= request.num_held
        self.num_tokens -= request.num_held * request.num_prompt_tokens
        request.num_held = 0
        for seq in request.sequences[1:]:
            if seq.state is SequenceState.WAITING:
                self.add(seq)
