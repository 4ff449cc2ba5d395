"""The error that a client gets when the core gives up its request."""

from __future__ import annotations

from scheduler_svc.core.messages import FailureKind, RequestFailed
from shared.errors import Aborted, DeadlineExceeded, QuireError, ResourceExhausted, Unavailable

RETRY_AFTER_S = 1.0


def error_of_failure(event: RequestFailed) -> QuireError:
    """The typed error of a failed request."""
    match event.kind:
        case FailureKind.QUEUE_TIMEOUT | FailureKind.DEADLINE:
            return DeadlineExceeded(event.message)
        case FailureKind.NO_REPLICA:
            return Unavailable(event.message, RETRY_AFTER_S)
        case FailureKind.TOO_LARGE:
            return ResourceExhausted("kv_cache", event.message, RETRY_AFTER_S)
        case FailureKind.SEQUENCE_FAILED | FailureKind.REPLICA_LOST_TOO_OFTEN:
            return Aborted(event.message)
