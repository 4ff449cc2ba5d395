"""Goes on with a beam search in a plan: forks beams, and gives each a slot for its next token."""

from __future__ import annotations

from scheduler_svc.core.beam_group import BeamGroup, ChosenToken
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Request, Sequence
from scheduler_svc.core.states import SequenceState
from scheduler_svc.core.step_draft import StepDraft
from scheduler_svc.core.waiting_queue import WaitingQueue
from shared.plan import Fork


def ready_searches(replica: Replica) -> list[Request]:
    """The beam searches whose next beams are chosen."""
    return [
        request
        for request in replica.beam_searches.values()
        if request.beams is not None and request.beams.chosen
    ]


class BeamGrowth:
    """The next step of one search.

    Where the last block is partly filled, the first beam that goes on from a parent keeps it and
    the others get copies; at a block's end each beam gets an empty block.
    """

    def __init__(
        self, request: Request, replica: Replica, waiting: WaitingQueue, draft: StepDraft
    ) -> None:
        assert request.beams is not None
        self._request = request
        self._group: BeamGroup = request.beams
        self._replica = replica
        self._waiting = waiting
        self._draft = draft
        first = request.sequences[self._group.chosen[0].parent]
        self._num_computed = int(replica.table.num_computed[first.row])

    @property
    def num_blocks(self) -> int:
        """Blocks that it takes."""
        return sum(one.is_fork or self._is_at_block_end for one in self._group.chosen)

    @property
    def _is_at_block_end(self) -> bool:
        return self._num_computed % self._replica.kv.block_size == 0

    def go_on(self) -> None:
        """Enter the step into the plan; its blocks must be free."""
        held = [seq for seq in self._request.sequences if seq.state is SequenceState.WAITING]
        # Forks first: they copy the parent's table as it is before its next block.
        forked = {
            rank: self._fork(held.pop(0), one)
            for rank, one in enumerate(self._group.chosen)
            if one.is_fork
        }
        running = []
        for rank, one in enumerate(self._group.chosen):
            seq = forked.get(rank) or self._keep(self._request.sequences[one.parent])
            self._draft.choose(seq.row, one.token_id)
            running.append(seq.index)
        self._group.go_on(running)

    def _fork(self, seq: Sequence, one: ChosenToken) -> Sequence:
        parent = self._request.sequences[one.parent]
        self._waiting.take_held(seq)
        block = self._replica.fork(seq, parent)
        self._draft.fork(Fork(seq.row, parent.row, block))
        if not self._is_at_block_end:
            self._draft.copy(parent.block_table[len(seq.block_table) - 1], block)
        return seq

    def _keep(self, seq: Sequence) -> Sequence:
        if self._is_at_block_end:
            table = self._replica.table
            table.capacity[seq.row] += table.block_size
            self._draft.append([seq.row], self._replica.kv.grow([seq]))
        return seq
