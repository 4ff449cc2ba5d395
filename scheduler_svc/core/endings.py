"""The ends of sequences and requests: by themselves, early, or by failure."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from scheduler_svc.core.messages import (
    FailureKind,
    FinishReason,
    RequestFailed,
    SequenceFinished,
)
from scheduler_svc.core.policy import SchedulingPolicy
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Request, Sequence
from scheduler_svc.core.results import Ending
from scheduler_svc.core.states import SequenceState
from scheduler_svc.core.story import Stories
from scheduler_svc.core.waiting_queue import WaitingQueue
from shared.ids import ReplicaId, RequestId


def take_off(replica: Replica, seq: Sequence, state: SequenceState) -> None:
    """A sequence that runs on `replica` or is swapped there goes to `state`."""
    if seq.is_running:
        replica.leave(seq, state)
    else:
        replica.leave_swapped(seq, state)


class Endings:
    """Takes what ends out of wherever it is; a request ends with the last of its sequences."""

    def __init__(
        self,
        requests: MutableMapping[RequestId, Request],
        replicas: Mapping[ReplicaId, Replica],
        waiting: WaitingQueue,
        policy: SchedulingPolicy,
        stories: Stories,
    ) -> None:
        """All of these are the scheduler's own; what has ended leaves `requests`."""
        self._requests = requests
        self._replicas = replicas
        self._waiting = waiting
        self._policy = policy
        self._stories = stories

    def finish(self, ending: Ending) -> SequenceFinished:
        """A sequence has its last token."""
        text = f"finished by {ending.reason.name} after {ending.num_output_tokens} tokens"
        self._stories.note(ending.seq, text)
        self._end_sequence(ending.seq)
        return _finished(ending)

    def finish_early(self, seq: Sequence, reason: FinishReason) -> SequenceFinished | None:
        """End a sequence that could have gone on; None if it has ended already."""
        if seq.state is SequenceState.FINISHED:
            return None
        self._stories.note(seq, f"finished by {reason.name}")
        self._end_sequence(seq)
        num_output_tokens = len(seq.token_ids) - seq.num_prompt_tokens
        return _finished(Ending(seq, reason, None, num_output_tokens))

    def fail(self, request: Request, kind: FailureKind, message: str) -> RequestFailed:
        """End a request with an error."""
        self._stories.tell(request, f"failed ({kind.value}): {message}")
        self.end_request(request)
        return RequestFailed(request.id, kind, message)

    def end_request(self, request: Request) -> None:
        """End all sequences of a request that still live."""
        for seq in request.sequences:
            self._end_sequence(seq)

    def _end_sequence(self, seq: Sequence) -> None:
        if seq.state is SequenceState.FINISHED:
            return
        request, beams = seq.request, seq.request.beams
        if seq.state is SequenceState.WAITING:
            self._waiting.discard(seq)
            seq.go(SequenceState.FINISHED)
        else:
            assert seq.replica is not None
            take_off(self._replicas[seq.replica], seq, SequenceState.FINISHED)
        num_generated = len(seq.token_ids) - seq.num_prompt_tokens
        if beams is not None and request.beams is None:  # with its last beam the search has left
            num_generated = beams.num_generated
        self._policy.charge(self._policy.lane(request.new.tenant), num_generated)
        if request.is_finished:
            del self._requests[request.id]
            self._stories.end(request)


def _finished(ending: Ending) -> SequenceFinished:
    seq = ending.seq
    return SequenceFinished(
        seq.request.id,
        seq.index,
        ending.reason,
        ending.stop_token_id,
        ending.num_output_tokens,
        seq.num_preemptions,
    )
