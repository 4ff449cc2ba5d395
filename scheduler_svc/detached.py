"""Requests that outlive their calls: each keeps what was written, so that another call goes on.

    engine --> KeptStream --> serve() of the one call that streams it --> its client
                    '------- every event written so far, by number

Whoever attaches names the last event that it has. Events are kept from the first on, since what a
server has written may never have arrived. One call streams a request; a newer one takes it over, as
the older one's client may be gone without a word. While no call does, a time to live runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from protos.quire.inference.v1 import inference_pb2
from scheduler_svc.admission import AdmittedRequest
from scheduler_svc.core.messages import NewRequest, RequestEvent
from scheduler_svc.streams import RequestStream, Write
from shared.errors import (
    Aborted,
    AlreadyExists,
    InvalidArgument,
    NotFound,
    QuireError,
    ResourceExhausted,
)
from shared.ids import RequestId

MIN_KEPT_TOKENS = 64
"""What a kept request counts for at least: its objects take as much as so many tokens' events."""
RETRY_AFTER_S = 5.0


def _num_kept(request: NewRequest, num_tokens: int) -> int:
    """What a request of so many tokens counts for, prompt and answers: one for each, and as much
    again for eight log-probabilities."""
    num_prompt = min(len(request.prompt_token_ids), num_tokens)
    weights = (_weight(request.num_prompt_logprobs), _weight(request.sampling.num_logprobs))
    count = num_prompt * weights[0] + (num_tokens - num_prompt) * weights[1]
    return max(MIN_KEPT_TOKENS, count)


def _weight(num_logprobs: int | None) -> int:
    return 1 if num_logprobs is None else 2 + num_logprobs // 8


class KeptStream(RequestStream):
    """The stream of one request that may be detached."""

    def __init__(
        self,
        admitted: AdmittedRequest,
        *,
        ttl_s: float,
        on_end: Callable[[KeptStream], None],
        **stream: Any,
    ) -> None:
        """`on_end` is called when the request has ended or was given up; `stream` is for
        RequestStream."""
        super().__init__(admitted, **stream)
        self.request_id = admitted.request.request_id
        self.num_kept_tokens = _num_kept(admitted.request, admitted.request.most_tokens)
        """What it counts for: the most that it may come to, once it has ended what it came to."""
        self.ttl_s = ttl_s
        self._at_end = [on_end]
        self._events: list[bytes] = []
        """Every event written so far, as messages; event i has number i + 1."""
        self._writer: asyncio.Task[None] | None = None

    @property
    def is_streamed(self) -> bool:
        """Whether a call streams it now."""
        return self._writer is not None

    @property
    def num_events(self) -> int:
        """How many events it has written."""
        return len(self._events)

    def deliver(self, event: RequestEvent, now: float) -> None:
        super().deliver(event, now)
        if self.is_ended:
            self.note_end()

    def fail(self, error: QuireError) -> None:
        super().fail(error)
        self.note_end()

    def shrink(self) -> None:
        """Counts for what it came to, now that it has ended."""
        self.num_kept_tokens = _num_kept(self._admitted.request, self.num_used_tokens)

    def at_end(self, call: Callable[[KeptStream], None]) -> None:
        """Also calls `call` when the request has ended or was given up."""
        self._at_end.append(call)

    def note_end(self) -> None:
        """It runs no more. Each that waits for it is called once."""
        calls, self._at_end = self._at_end, []
        for call in calls:
            call(self)

    async def serve(self, write: Write, after_event: int = 0) -> None:
        """Writes every event after one number, to the end, in place of the call that did so before.

        Raises the error that ended the request, and Aborted when a newer call takes it over.
        """
        if self._writer is not None:
            self._writer.cancel()
        writer = self._writer = asyncio.create_task(self._write(write, after_event))
        try:
            await writer
        except asyncio.CancelledError:
            if self._writer is not writer:
                raise Aborted("another call has taken up this request") from None
            raise
        finally:
            writer.cancel()
            if self._writer is writer:
                self._writer = None

    async def _write(self, write: Write, after_event: int) -> None:
        for event in self._events[after_event:]:
            await write(inference_pb2.GenerateResponse.FromString(event))
        while (message := await self.next_message()) is not None:
            # Nothing is awaited between taking an event and keeping it, so that none is lost.
            message.event_number = len(self._events) + 1
            self._events.append(message.SerializeToString())
            await write(message)


class DetachedRequests:
    """The kept streams, by request. For one event loop."""

    def __init__(self, max_tokens: int, abort: Callable[[KeptStream], None]) -> None:
        """`abort` tells the engine that nobody waits for a request any more."""
        self._max_tokens = max_tokens
        self._abort = abort
        self._num_tokens = 0
        self._streams: dict[RequestId, KeptStream] = {}
        self._timers: dict[RequestId, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def check_free(self, request_id: RequestId) -> None:
        """Raises AlreadyExists while a request of this id is kept."""
        if request_id in self._streams:
            raise AlreadyExists("a request with this id can be attached to")

    def add(self, stream: KeptStream) -> None:
        """Keeps a stream; ResourceExhausted when it may come to more than there is room for."""
        if self._num_tokens + stream.num_kept_tokens > self._max_tokens:
            raise ResourceExhausted(
                "max_detached_tokens",
                f"requests that may be detached hold {self._num_tokens} tokens already",
                RETRY_AFTER_S,
            )
        self._streams[stream.request_id] = stream
        self._num_tokens += stream.num_kept_tokens
        stream.at_end(self._shrink)

    def take(self, request_id: RequestId, after_event: int) -> KeptStream:
        """The stream of a request, for a call that goes on with it and says `left` at its end.

        Raises NotFound when none is kept, InvalidArgument when it has not come to `after_event`.
        """
        stream = self._streams.get(request_id)
        if stream is None:
            raise NotFound("there is no such request, or it can't be attached to any more")
        if after_event > stream.num_events:
            raise InvalidArgument("after_event", f"the last event was {stream.num_events}")
        self._stop_timer(request_id)
        return stream

    def left(self, stream: KeptStream, policy: inference_pb2.DisconnectPolicy) -> None:
        """A call that streamed it is over. Nothing happens if another one goes on."""
        if stream.is_streamed or self._streams.get(stream.request_id) is not stream:
            return
        self._stop_timer(stream.request_id)
        is_refused = stream.is_ended and stream.num_events == 0
        if is_refused or policy == inference_pb2.DISCONNECT_POLICY_ABORT:
            self._drop(stream)
            return
        loop = asyncio.get_running_loop()
        self._timers[stream.request_id] = loop.call_later(stream.ttl_s, self._drop, stream)

    def close(self) -> None:
        """Forgets every stream."""
        for stream in list(self._streams.values()):
            self._drop(stream)

    def _shrink(self, stream: KeptStream) -> None:
        """It has ended, and counts from now on for no more than it has."""
        self._num_tokens -= stream.num_kept_tokens
        stream.shrink()
        self._num_tokens += stream.num_kept_tokens

    def _drop(self, stream: KeptStream) -> None:
        self._stop_timer(stream.request_id)
        if not stream.is_ended:
            self._abort(stream)
            stream.note_end()
        del self._streams[stream.request_id]
        self._num_tokens -= stream.num_kept_tokens

    def _stop_timer(self, request_id: RequestId) -> None:
        timer = self._timers.pop(request_id, None)
        if timer is not None:
            timer.cancel()
