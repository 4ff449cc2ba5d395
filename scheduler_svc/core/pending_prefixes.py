"""Who is computing which block right now, so that others with the same prefix need not."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_svc.core.request import Sequence


class PendingPrefixes:
    """Digests of blocks that running sequences of one replica have yet to publish.

    The first sequence that computes a block leads. A digest alone decides here, since the worst
    that a collision does is to let a sequence wait a while for nothing.
    """

    def __init__(self) -> None:
        self._leaders: dict[bytes, Sequence] = {}

    def __len__(self) -> int:
        return len(self._leaders)

    def add(self, seq: Sequence, digests: Iterable[bytes]) -> None:
        """`seq` computes the blocks of `digests`, unless another does already."""
        for digest in digests:
            self._leaders.setdefault(digest, seq)

    def leader(self, digest: bytes) -> Sequence | None:
        """Who computes the block of `digest`."""
        return self._leaders.get(digest)

    def leaders(self) -> list[tuple[bytes, Sequence]]:
        """Each digest with its leader; for checks."""
        return list(self._leaders.items())

    def discard(self, seq: Sequence, digests: Iterable[bytes]) -> None:
        """`seq` has published the blocks of `digests`, or does not go on with them."""
        for digest in digests:
            if self._leaders.get(digest) is seq:
                del self._leaders[digest]
