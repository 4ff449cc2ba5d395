"""Which replica a waiting sequence goes to, where several could take it.

The waiting queue is global and each replica takes from it when it is scheduled. Cost in seconds,
by each replica's measured rates:

    prompt tokens neither cached there nor computed by another sequence there
    + prompts started there already + load of its decodes

So a prefix attracts what begins with it until the work before that is worth more than to compute
the prefix again, and then spreads to the next replica.

A replica takes a sequence unless another with a seat and blocks has it cheaper; then it notes the
sequence there and looks at the next, so that one call sees the load as it will be, and two idle
replicas share a burst evenly. A sequence left to others MAX_DEFERRALS times is taken by any, so
that a replica which doesn't come round can't hold it up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Sequence

DECODE_LOAD_STEPS = 64
"""A running sequence counts as so many steps of its decoding row."""
MAX_DEFERRALS = 4


def usable(replicas: Iterable[Replica]) -> list[Replica]:
    """Those of `replicas` that start new requests."""
    return [replica for replica in replicas if not replica.is_draining]


def may_take(replica: Replica, seq: Sequence, replicas: Iterable[Replica]) -> bool:
    """Whether `replica` could ever run `seq`. A draining one takes back what has started, if no
    other can."""
    num_tokens = len(seq.token_ids)
    new = seq.request.new
    if not replica.can_ever_hold(new, num_tokens):
        return False
    if not replica.is_draining:
        return True
    return seq.request.is_started and not any(
        other.can_ever_hold(new, num_tokens) for other in replicas if not other.is_draining
    )


def _load_s(replica: Replica) -> float:
    cost = replica.cost
    decodes_s = DECODE_LOAD_STEPS * cost.row_s * replica.num_running
    return cost.token_s * replica.table.prefill_backlog + decodes_s


def _prefill_s(replica: Replica, seq: Sequence, num_uncached: int) -> float:
    return replica.cost.prefill_s(len(seq.token_ids) - num_uncached, num_uncached)


@dataclass(slots=True)
class _Peer:
    replica: Replica
    load_s: float
    num_seats: int
    num_blocks: int


class Placement:
    """Compares one replica with its peers over one planning of a step."""

    def __init__(self, here: Replica, replicas: Iterable[Replica]) -> None:
        self._here = here
        self._peers = [
            _Peer(
                replica,
                _load_s(replica),
                replica.num_seats,
                replica.kv.pool.num_free,
            )
            for replica in replicas
            if replica is not here and not replica.is_draining
        ]

    def is_best_here(self, seq: Sequence, num_uncached: int) -> bool:
        """Whether the planning replica, where `num_uncached` tokens are left to compute, takes
        `seq`; otherwise it is noted as another's load."""
        if self._here.is_draining or seq.num_deferrals >= MAX_DEFERRALS or not self._peers:
            return True
        here_s = _prefill_s(self._here, seq, num_uncached) + _load_s(self._here)
        costs = [
            (prefill_s + peer.load_s, number, prefill_s)
            for number, peer in enumerate(self._peers)
            if (prefill_s := self._prefill_at(peer, seq)) is not None
        ]
        if not costs or here_s <= min(costs)[0]:
            return True
        _, number, prefill_s = min(costs)
        peer = self._peers[number]
        num_beams = seq.request.new.num_beams
        peer.load_s += prefill_s + num_beams * DECODE_LOAD_STEPS * peer.replica.cost.row_s
        peer.num_seats -= num_beams
        peer.num_blocks -= peer.replica.kv.num_blocks_for(len(seq.token_ids))
        seq.num_deferrals += 1
        return False

    @staticmethod
    def _prefill_at(peer: _Peer, seq: Sequence) -> float | None:
        """Seconds that `seq` would compute there; None if there is no room for it now."""
        kv = peer.replica.kv
        num_tokens = len(seq.token_ids)
        if (
            peer.num_seats < seq.request.new.num_beams
            or kv.num_blocks_for(num_tokens) > peer.num_blocks
        ):
            return None
        match = kv.find_prefix(seq)
        num_found = max(match.num_tokens, match.num_led_blocks * kv.block_size)
        return _prefill_s(peer.replica, seq, num_tokens - num_found)
