"""Bearer tokens: who may call at all."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

SCHEME = b"bearer "
OPEN_SERVICES = "/grpc.health.v1.Health/"
"""Probes of load balancers carry no token, and a status tells nothing secret."""


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without one of the tokens in the metadata `authorization: Bearer <token>`."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        assert tokens and all(tokens), "an empty token would let everybody in"
        self._tokens = tuple(tokens)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(OPEN_SERVICES):
            return handler
        if self._allows(handler_call_details.invocation_metadata or ()):
            return handler
        return _refusing(handler)

    def _allows(self, metadata: Sequence[tuple[str, str | bytes]]) -> bool:
        given = b""
        for key, value in metadata:
            if key == "authorization":
                given = value.encode() if isinstance(value, str) else value
        if given[: len(SCHEME)].lower() != SCHEME:
            return False
        token = given[len(SCHEME) :].strip()
        # Every token is compared, so that the time tells nothing of which one came close.
        return any([hmac.compare_digest(token, known) for known in self._tokens])


def _refusing(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    """A handler of the same kind that answers UNAUTHENTICATED."""

    async def refuse(_request: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(
            grpc.StatusCode.UNAUTHENTICATED, "give a token: authorization: Bearer <token>"
        )

    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)
