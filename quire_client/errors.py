"""A failed call as a typed exception, with what the server said of it in google.rpc details."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

_DETAILS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """What is wrong with one field of a request."""

    field: str
    """Path in the message, such as "sampling.top_p"."""
    description: str


class CallError(Exception):
    """A call failed. `str(error)` is the server's sentence."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        limit: str = "",
        field_violations: tuple[FieldViolation, ...] = (),
        retry_delay_s: float | None = None,
    ) -> None:
        super().__init__(message or f"the call failed with {code.name}")
        self.code = code
        self.reason = reason
        """The server's own name of the error's kind; "" when it gave none."""
        self.limit = limit
        """Name of the limit that was reached; "" for other errors."""
        self.field_violations = field_violations
        self.retry_delay_s = retry_delay_s
        """After how many seconds the same call may pass; None when nothing says that it will."""


class InvalidArgument(CallError):
    """The request breaks a documented limit; `field_violations` say where."""


class NotFound(CallError):
    """There is no such model."""


class AlreadyExists(CallError):
    """Another live request has this id."""


class ResourceExhausted(CallError):
    """A queue or quota is full; `limit` names it."""


class Unavailable(CallError):
    """No server answers, or it has no ready worker, or it is leaving."""


class DeadlineExceeded(CallError):
    """The call's timeout or the request's queue timeout passed."""


class Aborted(CallError):
    """The request was lost or failed by itself on the server."""


class Cancelled(CallError):
    """The call was cancelled."""


class Unauthenticated(CallError):
    """The server wants a token that it knows."""


_TYPES: dict[grpc.StatusCode, type[CallError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.ABORTED: Aborted,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
}


def call_error(error: grpc.RpcError) -> CallError:
    """The typed error of what a call of grpc or grpc.aio raised."""
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry: error_details_pb2.RetryInfo | None = None
    for detail in _details(error):
        if detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
        elif not detail.Unpack(info):
            detail.Unpack(bad_request)
    code = error.code()
    return _TYPES.get(code, CallError)(
        code,
        error.details() or "",
        reason=info.reason,
        limit=info.metadata.get("limit", ""),
        field_violations=tuple(
            FieldViolation(violation.field, violation.description)
            for violation in bad_request.field_violations
        ),
        retry_delay_s=None if retry is None else retry.retry_delay.ToNanoseconds() / 1e9,
    )


def _details(error: grpc.RpcError) -> list[status_pb2.any__pb2.Any]:
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY:
            try:
                return list(status_pb2.Status.FromString(value).details)
            except DecodeError:
                return []
    return []
