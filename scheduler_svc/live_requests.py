"""The requests that the core holds, and the sinks that hear of them."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat

from scheduler_svc.core.messages import (
    Event,
    NewRequest,
    RequestEvent,
    RequestFailed,
    RequestRecovered,
    SequenceFinished,
    TokensStep,
)
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.inbox import RequestSink
from shared.errors import Aborted, QuireError
from shared.ids import RequestId

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _LiveRequest:
    sink: RequestSink
    num_open_sequences: int


class LiveRequests:
    """A request is live from its submission until its last event, error or abort."""

    def __init__(self, scheduler: Scheduler, counters: Counter[str]) -> None:
        self._scheduler = scheduler
        self._counters = counters
        self._live: dict[RequestId, _LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._live

    def add(self, request: NewRequest, sink: RequestSink) -> None:
        """The core has taken `request`."""
        self._live[request.request_id] = _LiveRequest(sink, request.num_sequences)

    def abandon(self, request_id: RequestId, sink: RequestSink) -> None:
        """The front behind `sink` is gone; nothing happens if the request has ended already,
        also when its id lives again with another sink."""
        live = self._live.get(request_id)
        if live is not None and live.sink is sink:
            self._counters["requests_aborted"] += 1
            self._remove(request_id)

    def stop(
        self, request_id: RequestId, sequence_index: int, sink: RequestSink, now: float
    ) -> None:
        """A stop string ended a sequence; nothing happens if it has ended by itself, also when
        its request's id lives again with another sink."""
        live = self._live.get(request_id)
        if live is None or live.sink is not sink:
            return
        end = self._scheduler.finish_sequence(request_id, sequence_index)
        if end is not None:
            self._deliver(end, now)

    def cancel(self, request_id: RequestId, now: float) -> None:
        """An operator ends a live request."""
        for end in self._scheduler.cancel(request_id):
            self._deliver(end, now)

    def end_all(self, error: QuireError) -> None:
        """Takes every request out of the core; each sink hears of `error`."""
        for request_id in list(self._live):
            self._remove(request_id).sink.fail(error)

    def disown_all(self, error: QuireError) -> None:
        """Lets every sink hear of `error` without a word to the core, which may be broken."""
        while self._live:
            self._live.popitem()[1].sink.fail(error)

    def dispatch(self, events: Iterable[Event], now: float) -> None:
        """Hands events to their sinks."""
        for event in events:
            if isinstance(event, TokensStep):
                self._deliver_tokens(event, now)
            else:
                self._deliver(event, now)

    def _deliver_tokens(self, step: TokensStep, now: float) -> None:
        live_requests = self._live
        num_tokens = len(step.token_ids)
        told = step.logprobs
        logprobs = repeat(None, num_tokens) if told is None else map(told.get, range(num_tokens))
        for (request_id, index), token_id, of_token in zip(
            step.sequences, step.token_ids, logprobs, strict=True
        ):
            live = live_requests.get(request_id)
            if live is None:
                continue  # it ended earlier in this turn
            try:
                live.sink.append(index, token_id, now, of_token)
            except Exception:
                self._break(request_id)

    def _deliver(self, event: RequestEvent, now: float) -> None:
        """Hands an event to its sink."""
        live = self._live.get(event.request_id)
        if live is None:
            return  # it ended earlier in this turn
        try:
            live.sink.deliver(event, now)
        except Exception:
            self._break(event.request_id)
            return
        if isinstance(event, SequenceFinished):
            live.num_open_sequences -= 1
            if live.num_open_sequences == 0:
                self._counters["requests_finished"] += 1
                del self._live[event.request_id]
        elif isinstance(event, RequestFailed):
            self._counters[f"requests_failed_{event.kind.value}"] += 1
            del self._live[event.request_id]
        elif isinstance(event, RequestRecovered):
            self._counters["requests_recovered"] += 1

    def _break(self, request_id: RequestId) -> None:
        """A sink's error, which is being handled, ends its own request alone."""
        log_id = secrets.token_hex(8)
        log.exception("request %r broke its stream; log id %s", request_id, log_id)
        self._counters["requests_broken"] += 1
        self._remove(request_id).sink.fail(
            Aborted(f"the request failed inside the server; log id {log_id}")
        )

    def _remove(self, request_id: RequestId) -> _LiveRequest:
        self._scheduler.abort(request_id)
        return self._live.pop(request_id)
