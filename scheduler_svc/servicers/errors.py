"""Errors become gRPC statuses with google.rpc details here alone, by `error_table`."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc._cython import cygrpc
from grpc_status import rpc_status

from scheduler_svc.servicers.error_table import ROW_OF
from shared.errors import InvalidArgument, QuireError, ResourceExhausted, Unavailable

log = logging.getLogger(__name__)

DOMAIN = "quire"
OUR_SERVICES = "/quire."
MAX_TEXT_BYTES = 1000
"""Of an error's text, which may hold the client's own words: a status says it up to three times,
and clients refuse a call's end that is larger than 8 KiB."""


def status_of(error: QuireError) -> status_pb2.Status:
    """The rich status of an error, by the table; INTERNAL for a type that is not for clients."""
    row = ROW_OF.get(type(error))
    text = _bounded(str(error))
    if row is None:
        return status_pb2.Status(code=grpc.StatusCode.INTERNAL.value[0], message=text)
    details = [_packed(_DETAILS[kind](error)) for kind in row.details]
    return status_pb2.Status(code=row.code.value[0], message=text, details=details)


def _bounded(text: str) -> str:
    """A text as a status can carry it: cut, and halves of surrogate pairs (JSON may have them)
    written out."""
    data = text.encode(errors="backslashreplace")
    if len(data) <= MAX_TEXT_BYTES:
        return data.decode()
    return data[:MAX_TEXT_BYTES].decode(errors="ignore") + "..."


def _error_info(error: QuireError) -> error_details_pb2.ErrorInfo:
    info = error_details_pb2.ErrorInfo(reason=_reason_of(error), domain=DOMAIN)
    if isinstance(error, ResourceExhausted):
        info.metadata["limit"] = error.limit
    return info


def _bad_request(error: QuireError) -> error_details_pb2.BadRequest:
    assert isinstance(error, InvalidArgument), error
    violation = error_details_pb2.BadRequest.FieldViolation(
        field=error.field, description=_bounded(error.description)
    )
    return error_details_pb2.BadRequest(field_violations=[violation])


def _reason_of(error: QuireError) -> str:
    """The error's type as UPPER_SNAKE_CASE, as google.rpc.ErrorInfo asks."""
    name = type(error).__name__
    return "".join("_" + char if char.isupper() else char for char in name).lstrip("_").upper()


def _retry_info(error: QuireError) -> error_details_pb2.RetryInfo:
    assert isinstance(error, ResourceExhausted | Unavailable), error
    delay = duration_pb2.Duration()
    delay.FromNanoseconds(int(error.retry_after_s * 1e9))
    return error_details_pb2.RetryInfo(retry_delay=delay)


_DETAILS: dict[type[Message], Callable[[QuireError], Message]] = {
    error_details_pb2.ErrorInfo: _error_info,
    error_details_pb2.BadRequest: _bad_request,
    error_details_pb2.RetryInfo: _retry_info,
}


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


class DeparturesFilter(logging.Filter):
    """For gRPC's own logger: clients that left before they heard how their call ended are no
    errors, and must not be able to fill the log with tracebacks."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = None if not isinstance(record.exc_info, tuple) else record.exc_info[1]
        return not isinstance(error, cygrpc.ExecuteBatchError)


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
                _guarded(handler.unary_unary, handler.request_deserializer),
                response_serializer=handler.response_serializer,
            )
        # Our streams write to their context, so that a cancel is raised inside the handler.
        return grpc.unary_stream_rpc_method_handler(
            _guarded(handler.unary_stream, handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )


def _guarded(handler: Handler, parse: Callable[[bytes], Any]) -> Handler:
    """`handler` with its requests parsed here: gRPC would log a traceback for bytes that are no
    message, and answer UNKNOWN."""

    async def call(data: bytes, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await handler(_parsed(data, parse), context)
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


def _parsed(data: bytes, parse: Callable[[bytes], Any]) -> Any:
    try:
        return parse(data)
    except DecodeError as error:
        raise InvalidArgument("request", "the bytes are no message of this call's type") from error
