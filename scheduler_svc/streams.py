"""One request's stream: from the engine's events to the messages that its client reads.

    engine -- deliver() --> text, stop strings --> buffer --> next_message() --> gRPC

The buffer merges: deltas that the client has not taken yet become one. A slow reader costs its
own token ids and text once, never one message per step, and holds nobody up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from protos.quire.inference.v1 import inference_pb2
from scheduler_svc.admission import AdmittedRequest
from scheduler_svc.core.messages import (
    FinishReason,
    NewRequest,
    RequestEvent,
    RequestFailed,
    RequestRecovered,
    RequestStarted,
    SequenceFinished,
    TokensAppended,
)
from scheduler_svc.failures import error_of_failure
from scheduler_svc.text.detokenizer import SequenceText
from shared.errors import QuireError
from shared.sampling import BeamParams

MAX_DELTA_TOKENS = 4096
"""Tokens merged into one Delta; keeps a message far below gRPC's 4 MiB."""


@dataclass(slots=True)
class _Delta:
    """New tokens of a sequence that the client has not taken yet."""

    sequence_index: int
    offset: int
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def message(self) -> inference_pb2.GenerateResponse:
        return inference_pb2.GenerateResponse(
            sequence_index=self.sequence_index,
            delta=inference_pb2.Delta(
                offset=self.offset, token_ids=self.token_ids, text="".join(self.texts)
            ),
        )


@dataclass(slots=True)
class _Sequence:
    """One sequence of the request."""

    text: SequenceText
    num_tokens: int = 0
    """Tokens put into the buffer so far."""
    stop_string: str | None = None
    open_delta: _Delta | None = None
    """The buffer's last delta of this sequence, while more can be merged into it."""
    is_finished: bool = False


class RequestStream:
    """The sink of one request. `deliver` and `fail` are the engine's, the rest is the front's."""

    def __init__(
        self,
        admitted: AdmittedRequest,
        *,
        model_name: str,
        new_text: Callable[[], SequenceText],
        stop_sequence: Callable[[int], None],
        arrival_s: float,
    ) -> None:
        """`stop_sequence(index)` tells the engine that a stop string ended a sequence."""
        self._admitted = admitted
        self._model_name = model_name
        self._stop_sequence = stop_sequence
        self._arrival_s = arrival_s
        self._started_s = arrival_s
        self._first_token_s: float | None = None
        self._is_started = False
        self._num_cached_tokens = 0
        request = admitted.request
        self._sequences = [_Sequence(new_text()) for _ in range(request.num_sequences)]
        self._buffer: deque[_Delta | inference_pb2.GenerateResponse] = deque()
        self._error: QuireError | None = None
        self._readable = asyncio.Event()

    @property
    def is_ended(self) -> bool:
        """Whether the engine has said its last word on this request."""
        return self._error is not None or all(s.is_finished for s in self._sequences)

    @property
    def num_used_tokens(self) -> int:
        """Tokens of the prompt and of the answers so far; 0 until it has started."""
        if not self._is_started:
            return 0
        request = self._admitted.request
        if request.beam is not None and not self.is_ended:
            return request.most_tokens  # what its beams have grown to is known at their end
        lengths = [sequence.num_tokens for sequence in self._sequences]
        num_tokens = sum(lengths) if request.beam is None else request.num_beams * max(lengths)
        return len(request.prompt_token_ids) + num_tokens

    async def next_message(self) -> inference_pb2.GenerateResponse | None:
        """The next message for the client, None after the last one.

        Raises the error that ended the request, once everything before it is taken.
        """
        while not self._buffer:
            if self._error is not None:
                raise self._error
            if self.is_ended:
                return None
            self._readable.clear()
            await self._readable.wait()
        item = self._buffer.popleft()
        if not isinstance(item, _Delta):
            return item
        sequence = self._sequences[item.sequence_index]
        if sequence.open_delta is item:
            sequence.open_delta = None
        return item.message()

    def fail(self, error: QuireError) -> None:
        """The request ended by an error."""
        self._error = error
        self._readable.set()

    def deliver(self, event: RequestEvent, now: float) -> None:
        """Takes an event of this request, in order."""
        match event:
            case TokensAppended():
                self._append(event, now)
            case RequestStarted():
                self._start(event)
            case SequenceFinished():
                self._finish(event, now)
            case RequestRecovered():
                self._recover()
            case RequestFailed():
                self._error = error_of_failure(event)
        self._readable.set()

    def _start(self, event: RequestStarted) -> None:
        self._is_started = True
        self._started_s = event.started_s
        self._num_cached_tokens = event.num_cached_tokens
        request = self._admitted.request
        started = inference_pb2.Started(
            request_id=self._admitted.client_id,
            model=self._model_name,
            max_tokens=request.max_tokens,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=event.num_cached_tokens,
        )
        if request.beam is None:
            started.sampling.CopyFrom(_sampling_in_force(request))
        else:
            started.beam.CopyFrom(_beam_in_force(request.beam))
        self._buffer.append(inference_pb2.GenerateResponse(started=started))

    def _append(self, event: TokensAppended, now: float) -> None:
        sequence = self._sequences[event.sequence_index]
        if sequence.stop_string is not None:
            return  # overshoot: computed before the engine heard of the stop
        if self._first_token_s is None:
            self._first_token_s = now
        delta = sequence.text.append(event.token_ids)
        kept = event.token_ids[: delta.num_tokens_kept]
        self._buffer_delta(event.sequence_index, kept, delta.text)
        if delta.stop_string is not None:
            sequence.stop_string = delta.stop_string
            self._stop_sequence(event.sequence_index)

    def _finish(self, event: SequenceFinished, now: float) -> None:
        index = event.sequence_index
        sequence = self._sequences[index]
        sequence.is_finished = True
        if self._first_token_s is None:
            self._first_token_s = now
        reason, num_output_tokens = event.reason, event.num_output_tokens
        if sequence.stop_string is not None:
            # Whatever the core saw in that step or later, the text ended here.
            reason, num_output_tokens = FinishReason.STOP_STRING, sequence.num_tokens
        else:
            self._buffer_delta(index, (), sequence.text.flush())
        if reason is FinishReason.MAX_TOKENS and self._admitted.is_bounded_by_context:
            reason = FinishReason.CONTEXT_LIMIT
        finished = inference_pb2.Finished(
            reason=inference_pb2.FinishReason.Name(reason.value),
            token_id=event.stop_token_id if reason is not FinishReason.STOP_STRING else None,
            stop_string=sequence.stop_string,
            usage=inference_pb2.Usage(
                num_prompt_tokens=len(self._admitted.request.prompt_token_ids),
                num_cached_tokens=self._num_cached_tokens,
                num_output_tokens=num_output_tokens,
            ),
            timings=inference_pb2.Timings(
                queue_s=self._started_s - self._arrival_s,
                first_token_s=self._first_token_s - self._arrival_s,
                total_s=now - self._arrival_s,
                num_preemptions=event.num_preemptions,
            ),
            beam_score=event.beam_score,
        )
        self._buffer.append(inference_pb2.GenerateResponse(sequence_index=index, finished=finished))

    def _recover(self) -> None:
        """Deltas after a recovery start a new message, so that it shows where it happened."""
        for index, sequence in enumerate(self._sequences):
            if not sequence.is_finished:
                sequence.open_delta = None
                recovered = inference_pb2.Recovered(offset=sequence.num_tokens)
                self._buffer.append(
                    inference_pb2.GenerateResponse(sequence_index=index, recovered=recovered)
                )

    def _buffer_delta(self, index: int, token_ids: Sequence[int], text: str) -> None:
        if not token_ids and not text:
            return
        sequence = self._sequences[index]
        delta = sequence.open_delta
        if delta is None or len(delta.token_ids) >= MAX_DELTA_TOKENS:
            delta = sequence.open_delta = _Delta(index, sequence.num_tokens)
            self._buffer.append(delta)
        delta.token_ids.extend(token_ids)
        delta.texts.append(text)
        sequence.num_tokens += len(token_ids)


def _sampling_in_force(request: NewRequest) -> inference_pb2.SamplingParams:
    sampling = request.sampling
    return inference_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        n=request.num_sequences,
        first_choice=request.first_choice,
    )


def _beam_in_force(beam: BeamParams) -> inference_pb2.BeamParams:
    return inference_pb2.BeamParams(
        width=beam.width,
        length_penalty=beam.length_penalty,
        early_stopping=inference_pb2.EarlyStopping.Name(beam.early_stopping.value),
        num_return=beam.num_return,
    )
