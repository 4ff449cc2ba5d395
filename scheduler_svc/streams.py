"""One request's stream: from the engine's events to the messages that its client reads.

    engine -- append(), deliver() --> buffer --> text --> write_all() --> gRPC

The buffer merges: tokens that the client has not taken yet become one delta, and are decoded
together. A slow reader costs its own token ids once, never one message per step, and holds nobody
up. What carries tokens alone waits for its turn among the streams that flow (write_pacer.py);
everything else is due at once, with all that was appended before it.

A sequence with stop strings is decoded token by token as they come, so that its end is known before
the next step is planned.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from protos.quire.inference.v1 import inference_pb2
from scheduler_svc.admission import AdmittedRequest
from scheduler_svc.core.messages import (
    FinishReason,
    PromptScored,
    RequestEvent,
    RequestFailed,
    RequestRecovered,
    RequestStarted,
    SequenceFinished,
    TokensAppended,
)
from scheduler_svc.failures import error_of_failure
from scheduler_svc.logprob_messages import fill_logprobs, prompt_messages
from scheduler_svc.started_message import started_message
from scheduler_svc.text.detokenizer import SequenceText
from scheduler_svc.write_pacer import WritePacer
from shared.errors import QuireError
from shared.logprobs import Logprobs

MAX_DELTA_TOKENS = 4096
"""Tokens merged into one Delta; keeps a message far below gRPC's 4 MiB."""


Write = Callable[[inference_pb2.GenerateResponse], Awaitable[Any]]
"""Writes to a client."""


@dataclass(slots=True)
class _Delta:
    """New tokens of a sequence that the client has not taken yet."""

    sequence_index: int
    offset: int
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)

    def message(self) -> inference_pb2.GenerateResponse:
        # Filled in place, which takes half as long as copying a Delta into the response.
        response = inference_pb2.GenerateResponse()
        response.sequence_index = self.sequence_index
        delta = response.delta
        delta.offset = self.offset
        delta.token_ids.extend(self.token_ids)
        delta.text = "".join(self.texts)
        if self.logprobs:
            fill_logprobs(delta.logprobs, self.logprobs)
        return response


@dataclass(slots=True)
class _Sequence:
    """One sequence of the request. Only the tokens of its open delta are not decoded yet, and none
    when it has stop strings."""

    index: int
    text: SequenceText
    num_tokens: int = 0
    """Tokens put into the buffer so far."""
    stop_string: str | None = None
    open_delta: _Delta | None = None
    """The buffer's last delta of this sequence, while more can be merged into it."""
    is_finished: bool = False


class RequestStream:
    """The sink of one request. `append`, `deliver` and `fail` are the engine's, the rest is the
    front's."""

    def __init__(
        self,
        admitted: AdmittedRequest,
        *,
        model_name: str,
        new_text: Callable[[], SequenceText],
        stop_sequence: Callable[[int], None],
        pacer: WritePacer,
        arrival_s: float,
    ) -> None:
        """`stop_sequence(index)` tells the engine that a stop string ended a sequence. `pacer` is
        the one of all streams of the process."""
        self._admitted = admitted
        self._model_name = model_name
        self._stop_sequence = stop_sequence
        self._arrival_s = arrival_s
        self._started_s = arrival_s
        self._first_token_s: float | None = None
        self._is_started = False
        self._num_cached_tokens = 0
        request = admitted.request
        self._sequences = [_Sequence(i, new_text()) for i in range(request.num_sequences)]
        self._num_open = request.num_sequences
        """Sequences that have not ended."""
        self._buffer: deque[_Delta | inference_pb2.GenerateResponse] = deque()
        self._error: QuireError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._num_due = 0
        """How many items at the head of the buffer are to be written now."""
        self._is_held = False
        """Whether the pacer wakes this stream when its turn comes."""
        self._pacer = pacer
        self._next_write_s = 0.0
        self._counted_in = -1

    @property
    def is_ended(self) -> bool:
        """Whether the engine has said its last word on this request."""
        return self._error is not None or self._num_open == 0

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

    async def write_all(self, write: Write) -> None:
        """Writes every message. Raises the error that ended the request, and those of `write`."""
        # Each frame of a task is woken twice for each message: so there are few of them.
        while True:
            message = self._take_due()
            if message is not None:
                await write(message)
            elif self.is_ended:
                return
            else:
                await self._due()

    async def next_message(self) -> inference_pb2.GenerateResponse | None:
        """The next message for the client, None after the last one.

        Raises the error that ended the request, once everything before it is taken.
        """
        while (message := self._take_due()) is None and not self.is_ended:
            await self._due()
        return message

    def _due(self) -> asyncio.Future[None]:
        """Done when something may be due. One task at a time waits for it."""
        self._reader = asyncio.get_running_loop().create_future()
        return self._reader

    def _take_due(self) -> inference_pb2.GenerateResponse | None:
        """The next message that is due, None when there is none or after the last one; raises the
        error of the end."""
        if self._num_due == 0:
            if self._error is not None:
                raise self._error
            return None
        item = self._buffer.popleft()
        self._num_due -= 1
        if isinstance(item, _Delta):
            self._close_delta(item)
            self._next_write_s = self._pacer.note_write(self._counted_in, len(self._sequences))
            self._counted_in = self._pacer.window
        if self._num_due == 0 and self._buffer:
            self._hold()  # it came while what was due was written
        return item.message() if isinstance(item, _Delta) else item

    def fail(self, error: QuireError) -> None:
        """The request ended by an error."""
        self._error = error
        self._make_due()

    def append(
        self, sequence_index: int, token_id: int, now: float, logprobs: Logprobs | None = None
    ) -> None:
        """Takes the next token of a sequence; every token of every step comes through here."""
        sequence = self._sequences[sequence_index]
        if sequence.stop_string is not None:
            return  # overshoot: computed before the engine heard of the stop
        if self._first_token_s is None:
            self._first_token_s = now
        delta = sequence.open_delta
        if delta is None or len(delta.token_ids) >= MAX_DELTA_TOKENS:
            delta = self._open_delta(sequence)
        delta.token_ids.append(token_id)
        if logprobs is not None:
            delta.logprobs.append(logprobs)
        sequence.num_tokens += 1
        if sequence.text.has_stop_strings:
            self._look_for_stop(sequence, delta, token_id)
        if self._num_due == 0 and not self._is_held:
            if now >= self._next_write_s:
                self._make_due()
            else:
                self._hold()

    def deliver(self, event: RequestEvent, now: float) -> None:
        """Takes an event of this request, in order."""
        match event:
            case TokensAppended():
                for token_id in event.token_ids:
                    self.append(event.sequence_index, token_id, now)
            case PromptScored():
                self._score(event)
            case RequestStarted():
                self._start(event)
            case SequenceFinished():
                self._finish(event, now)
            case RequestRecovered():
                self._recover()
            case RequestFailed():
                self._error = error_of_failure(event)
        self._make_due()

    # -- turns ----------------------------------------------------------------------------------

    def _make_due(self) -> None:
        """All that is in the buffer is to be written now."""
        self._num_due = len(self._buffer)
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    def _hold(self) -> None:
        """What is in the buffer is due when it is this stream's turn."""
        if not self._is_held:
            self._is_held = True
            self._pacer.hold(self._next_write_s, self._release)

    def _release(self) -> None:
        self._is_held = False
        self._make_due()

    # -- events ---------------------------------------------------------------------------------

    def _start(self, event: RequestStarted) -> None:
        self._is_started = True
        self._started_s = event.started_s
        self._num_cached_tokens = event.num_cached_tokens
        self._buffer.append(started_message(self._admitted, event, self._model_name))

    def _finish(self, event: SequenceFinished, now: float) -> None:
        index = event.sequence_index
        sequence = self._sequences[index]
        sequence.is_finished = True
        self._num_open -= 1
        if self._first_token_s is None:
            self._first_token_s = now
        reason, num_output_tokens = event.reason, event.num_output_tokens
        if sequence.stop_string is not None:
            # Whatever the core saw in that step or later, the text ended here.
            reason, num_output_tokens = FinishReason.STOP_STRING, sequence.num_tokens
        else:
            self._flush_text(sequence)
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
        for sequence in self._sequences:
            if not sequence.is_finished:
                self._close_delta(sequence.open_delta)
                recovered = inference_pb2.Recovered(offset=sequence.num_tokens)
                self._buffer.append(
                    inference_pb2.GenerateResponse(
                        sequence_index=sequence.index, recovered=recovered
                    )
                )

    def _score(self, event: PromptScored) -> None:
        """Log-probabilities of the prompt go out as they come, in messages of bounded size."""
        prompt = self._admitted.request.prompt_token_ids
        self._buffer += prompt_messages(event.offset, prompt, event.logprobs)

    # -- deltas ---------------------------------------------------------------------------------

    def _open_delta(self, sequence: _Sequence) -> _Delta:
        self._close_delta(sequence.open_delta)
        delta = sequence.open_delta = _Delta(sequence.index, sequence.num_tokens)
        self._buffer.append(delta)
        return delta

    def _close_delta(self, delta: _Delta | None) -> None:
        """Nothing more is merged into `delta`; decodes it. A closed one stays as it is."""
        if delta is None:
            return
        sequence = self._sequences[delta.sequence_index]
        if sequence.open_delta is delta:
            sequence.open_delta = None
            if not sequence.text.has_stop_strings:
                delta.texts.append(sequence.text.decode(delta.token_ids))

    def _look_for_stop(self, sequence: _Sequence, delta: _Delta, token_id: int) -> None:
        found = sequence.text.append((token_id,))
        delta.texts.append(found.text)
        if found.stop_string is not None:
            sequence.stop_string = found.stop_string
            self._stop_sequence(sequence.index)

    def _flush_text(self, sequence: _Sequence) -> None:
        """The text that was held back joins the last delta, or is one by itself."""
        delta = sequence.open_delta
        self._close_delta(delta)
        text = sequence.text.flush()
        if text:
            (delta or self._open_delta(sequence)).texts.append(text)
