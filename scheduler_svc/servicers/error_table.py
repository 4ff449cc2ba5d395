"""Every error that a client can get: the one table behind the statuses and docs/API.md.

A limit that can be reached has its name in LIMITS; the same name is in the error's ErrorInfo.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo

from shared.errors import (
    Aborted,
    AlreadyExists,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    QuireError,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """One kind of error."""

    error: type[QuireError] | None
    """What our code raises; None where gRPC answers by itself, or for a defect."""
    code: grpc.StatusCode
    details: tuple[type[Message], ...]
    """Messages of google.rpc in the status, in this order."""
    when: str
    client: str
    """What the client should do."""


ERRORS = (
    ErrorRow(
        InvalidArgument,
        grpc.StatusCode.INVALID_ARGUMENT,
        (ErrorInfo, BadRequest),
        "A field is out of its range, or asks for what could never run here. `BadRequest` names "
        "the field by its path, such as `sampling.top_p`.",
        "Correct the field. The same call never passes.",
    ),
    ErrorRow(
        Unauthenticated,
        grpc.StatusCode.UNAUTHENTICATED,
        (ErrorInfo,),
        "The server asks for tokens, and the call has none, or none that is good at this port.",
        "Send `authorization: Bearer TOKEN` in the metadata.",
    ),
    ErrorRow(
        NotFound,
        grpc.StatusCode.NOT_FOUND,
        (ErrorInfo,),
        "There is no such model, request or worker.",
        "Correct the name. ListModels, ListRequests and ListWorkers give those that exist.",
    ),
    ErrorRow(
        AlreadyExists,
        grpc.StatusCode.ALREADY_EXISTS,
        (ErrorInfo,),
        "A request with this `request_id` lives, or can be attached to; it is left alone.",
        "Attach to it, if it may be detached. Otherwise take another id, or leave it empty. After "
        "a retry the first try may still live, until the server sees that its client is gone.",
    ),
    ErrorRow(
        ResourceExhausted,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        (ErrorInfo, RetryInfo),
        "A limit of the server or of the tenant is reached. `ErrorInfo.metadata` names it under "
        "`limit`; see the table of limits.",
        "Try again after the delay of `RetryInfo`.",
    ),
    ErrorRow(
        None,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        (),
        "gRPC itself refused the call: its message or its metadata is too large, or too many calls "
        "are open.",
        "Send less.",
    ),
    ErrorRow(
        Unavailable,
        grpc.StatusCode.UNAVAILABLE,
        (ErrorInfo, RetryInfo),
        "No worker is ready, admission is paused, or the server shuts down. In the midst of a "
        "stream: the last worker is lost.",
        "Try again after the delay of `RetryInfo`; a gRPC retry policy may do so.",
    ),
    ErrorRow(
        DeadlineExceeded,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        (ErrorInfo,),
        "The queue timeout ended, or the request can't start before it or before the call's "
        "deadline. At the deadline itself gRPC answers, without details.",
        "Give more time, or try when less waits.",
    ),
    ErrorRow(
        Aborted,
        grpc.StatusCode.ABORTED,
        (ErrorInfo,),
        "The request failed by itself: on its worker, on several workers that were lost with it, "
        "or in the server (a log id is in the message). Or another call has attached to it.",
        "Try once again, unless you attached elsewhere. If it fails again, report it.",
    ),
    ErrorRow(
        None,
        grpc.StatusCode.CANCELLED,
        (),
        "The client cancelled the call.",
        "Nothing: its sequences stop in the next step.",
    ),
    ErrorRow(
        None,
        grpc.StatusCode.INTERNAL,
        (),
        "A defect of the server; the message has the id of the log entry.",
        "Report it with the log id.",
    ),
)

ROW_OF = {row.error: row for row in ERRORS if row.error is not None}


LIMITS = {
    "max_waiting": "Sequences that wait (a request of n choices counts n); `--max-waiting`.",
    "max_waiting_tokens": "Prompt tokens that wait; `--max-waiting-tokens`.",
    "max_streams": "Generate and Attach calls open at once; `--max-streams`.",
    "max_detached_tokens": "Tokens of requests that can be attached to, prompts and most of "
    "their answers; `--max-detached-tokens`.",
    "max_pending_text_calls": "Texts and conversations that are tokenized or rendered, or wait for "
    "it.",
    "max_pending_constraints": "Constraints that are compiled or wait for it, or costly ones among "
    "them; where tokens name tenants, also the tenant's costly ones.",
    "max_health_watches": "Health watches open at once.",
    "tenant_requests": "The tenant's requests that wait or run, one of n choices or beams counting "
    "n; `requests` of its quota. The delay is a guess from how long they took lately.",
    "tenant_tokens": "Tokens that the tenant's requests that wait or run may come to: prompts, and "
    "`max_tokens` of each choice or beam; `tokens` of its quota. The delay is a guess as well.",
    "tenant_requests_per_min": "Requests and tokenizer calls of the tenant's last minute; "
    "`requests_per_min` of its quota. The delay is exact.",
    "tenant_tokens_per_min": "Tokens of the tenant's last minute; `tokens_per_min` of its quota. "
    "The delay is what it takes at most: requests that end early give tokens back.",
    "kv_cache": "The caches of the workers that are left can't hold the request any more.",
}
"""What can be reached, by the name that ErrorInfo's metadata give under `limit`."""
