"""The one place where errors become gRPC statuses with google.rpc details."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from shared.errors import (
    Aborted,
    AlreadyExists,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    QuireError,
    ResourceExhausted,
    Unavailable,
)

log = logging.getLogger(__name__)

DOMAIN = "quire"
OUR_SERVICES = "/quire."

_CODES: dict[type[QuireError], grpc.StatusCode] = {
    InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    NotFound: grpc.StatusCode.NOT_FOUND,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Aborted: grpc.StatusCode.ABORTED,
}


def status_of(error: QuireError) -> status_pb2.Status:
    """The rich status of an error; INTERNAL for a type that is not for clients."""
    code = _CODES.get(type(error), grpc.StatusCode.INTERNAL)
    details = [_packed(detail) for detail in _details_of(error)]
    return status_pb2.Status(code=code.value[0], message=str(error), details=details)


def _details_of(error: QuireError) -> list[Message]:
    reason = error_details_pb2.ErrorInfo(reason=_reason_of(error), domain=DOMAIN)
    if isinstance(error, InvalidArgument):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.description
        )
        return [reason, error_details_pb2.BadRequest(field_violations=[violation])]
    if isinstance(error, ResourceExhausted):
        reason.metadata["limit"] = error.limit
        return [reason, _retry_info(error.retry_after_s)]
    if isinstance(error, Unavailable):
        return [reason, _retry_info(error.retry_after_s)]
    return [reason]


def _reason_of(error: QuireError) -> str:
    """The error's type as UPPER_SNAKE_CASE, as google.rpc.ErrorInfo asks."""
    name = type(error).__name__
    return "".join("_" + char if char.isupper() else char for char in name).lstrip("_").upper()


def _retry_info(retry_after_s: float) -> error_details_pb2.RetryInfo:
    delay = duration_pb2.Duration()
    delay.FromNanoseconds(int(retry_after_s * 1e9))
    return error_details_pb2.RetryInfo(retry_delay=delay)


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


Handler = Callable[[Any, Any], Awaitable[Any]]


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Turns what our handlers raise into statuses; nothing of a traceback reaches a client."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(OUR_SERVICES):
            return handler
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _guarded(handler.unary_unary),
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            )
        # Our streams write to their context, so that a cancel is raised inside the handler.
        return grpc.unary_stream_rpc_method_handler(
            _guarded(handler.unary_stream),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _guarded(handler: Handler) -> Handler:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await handler(request, context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except QuireError as error:
            status = status_of(error)
        except Exception:
            log_id = secrets.token_hex(8)
            log.exception("a call failed on a defect; log id %s", log_id)
            status = status_pb2.Status(
                code=grpc.StatusCode.INTERNAL.value[0],
                message=f"the server failed on this call; log id {log_id}",
            )
        await context.abort_with_status(rpc_status.to_status(status))
        return None

    return call
