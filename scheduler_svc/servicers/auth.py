"""Bearer tokens: who may call at all."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc_status import rpc_status

from scheduler_svc.core.messages import DEFAULT_TENANT
from scheduler_svc.security_config import ClientToken
from scheduler_svc.servicers.errors import status_of
from shared.errors import Unauthenticated

SCHEME = b"bearer "
OPEN_SERVICES = "/grpc.health.v1.Health/"
"""Probes of load balancers carry no token, and a status tells nothing secret."""


Metadata = Sequence[tuple[str, str | bytes]]


class TokenBook:
    """The accepted tokens and whose they are."""

    def __init__(self, tokens: Sequence[ClientToken]) -> None:
        assert all(token.secret for token in tokens), "an empty token would let everybody in"
        self._tokens = tuple(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def tenant_of(self, metadata: Metadata) -> str | None:
        """The tenant of a call by its `authorization: Bearer <token>`; None without a good one."""
        given = b""
        for key, value in metadata:
            if key == "authorization":
                given = value.encode() if isinstance(value, str) else value
        if given[: len(SCHEME)].lower() != SCHEME:
            return None
        secret = given[len(SCHEME) :].strip()
        # Every token is compared, so that the time tells nothing of which one came close.
        found = [hmac.compare_digest(secret, token.secret) for token in self._tokens]
        return self._tokens[found.index(True)].tenant if any(found) else None

    def tenant_of_call(self, context: grpc.aio.ServicerContext) -> str:
        """The tenant of a call that was let in."""
        return self.tenant_of(context.invocation_metadata() or ()) or DEFAULT_TENANT


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without one of the tokens."""

    def __init__(self, tokens: TokenBook) -> None:
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(OPEN_SERVICES):
            return handler
        if self._tokens.tenant_of(handler_call_details.invocation_metadata or ()) is not None:
            return handler
        return _refusing(handler)


def _refusing(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    """A handler of the same kind that answers UNAUTHENTICATED."""

    status = status_of(Unauthenticated("give a token: authorization: Bearer <token>"))

    async def refuse(_request: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort_with_status(rpc_status.to_status(status))

    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)
