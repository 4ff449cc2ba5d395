"""grpc.health.v1.Health: the library's, a list of all services, and a limit on watches.

It asks for no token, so that a watch without end may not take calls from those who have one.
"""

from __future__ import annotations

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_status import rpc_status

from scheduler_svc.servicers.errors import status_of
from shared.errors import ResourceExhausted

MAX_WATCHES = 128
"""Watch calls open at once."""
RETRY_AFTER_S = 1.0


class HealthServicer(health.aio.HealthServicer):  # type: ignore[misc]
    """Health by service; `set` is its owner's."""

    def __init__(self) -> None:
        super().__init__()
        self._services: set[str] = set()
        self._num_watches = 0

    async def set(self, service: str, status: int) -> None:
        """The health of one service; "" is the whole server."""
        self._services.add(service)
        await super().set(service, status)

    async def List(  # noqa: N802
        self, _request: health_pb2.HealthListRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthListResponse:
        """The health of every service, by its name."""
        statuses = {
            service: await self.Check(health_pb2.HealthCheckRequest(service=service), context)
            for service in sorted(self._services)
        }
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """The health now, and each change of it."""
        if self._num_watches >= MAX_WATCHES:
            error = ResourceExhausted(
                "max_health_watches", f"{MAX_WATCHES} watches are open", RETRY_AFTER_S
            )
            await context.abort_with_status(rpc_status.to_status(status_of(error)))
        self._num_watches += 1
        try:
            await super().Watch(request, context)
        finally:
            self._num_watches -= 1
