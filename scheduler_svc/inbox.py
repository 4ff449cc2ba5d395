"""What fronts and workers say to the engine, and where the engine answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from scheduler_svc.core.messages import NewRequest, RequestEvent
from shared.errors import QuireError
from shared.ids import RequestId
from shared.logprobs import Logprobs


class RequestSink(Protocol):
    """Where a request's front hears of it. No call may block."""

    def append(
        self, sequence_index: int, token_id: int, now: float, logprobs: Logprobs | None
    ) -> None:
        """Takes the next token of a sequence: the request's part of a TokensStep."""

    def deliver(self, event: RequestEvent, now: float) -> None:
        """Takes an event of this request, in order."""

    def fail(self, error: QuireError) -> None:
        """The request ended without having run to its end; nothing more comes."""


@dataclass(frozen=True, slots=True)
class Submit:
    """A new request; its sink hears of a refusal by `fail`."""

    request: NewRequest
    sink: RequestSink


@dataclass(frozen=True, slots=True)
class Abort:
    """The front of a request is gone. A sink names which one, as ids are used again."""

    request_id: RequestId
    sink: RequestSink


@dataclass(frozen=True, slots=True)
class StopSequence:
    """A stop string ended a sequence. A sink names whose, as ids are used again."""

    request_id: RequestId
    sequence_index: int
    sink: RequestSink


class Frame(NamedTuple):
    """What a worker sent."""

    identity: bytes
    frame: bytes


Message = Submit | Abort | StopSequence | Frame
