"""Quire as an engine: `quire serve`, so a scheduler and a worker, asked over gRPC."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.load import Sender, Trace
from bench.peers.engine import Send, Setup, free_port, process, wait_until_ready
from bench.workload import Job

HEALTH_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Server:
    """A running Quire."""

    send: Send
    admin: grpc.aio.Channel
    """To the operator's API."""


@contextlib.asynccontextmanager
async def start(setup: Setup, options: Sequence[str] = ()) -> AsyncIterator[Send]:
    """`options` go to `quire serve` as they are."""
    async with serve(setup, options) as server:
        yield server.send


@contextlib.asynccontextmanager
async def serve(
    setup: Setup, options: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> AsyncIterator[Server]:
    """As `start`, with more of the server; `environment` is added to ours."""
    address, admin_address = (f"127.0.0.1:{free_port()}" for _ in range(2))
    command: list[str | Path] = [sys.executable, "-m", "cli", "serve", "--model", setup.model]
    command += ["--listen", address, "--admin-listen", admin_address]
    command += ["--threads", str(setup.threads), *options]
    async with (
        process(command, setup.log, environment=environment) as child,
        grpc.aio.insecure_channel(address) as channel,
        grpc.aio.insecure_channel(admin_address) as admin,
    ):
        await wait_until_ready(child, setup.log, lambda: _is_serving(channel))

        async def send(prompt: str, max_tokens: int, due_s: float) -> Trace:
            return await Sender(channel).send(Job(prompt, max_tokens), due_s)

        yield Server(send, admin)


async def _is_serving(channel: grpc.aio.Channel) -> bool:
    """True once a worker is ready, by the standard health service."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=HEALTH_TIMEOUT_S, wait_for_ready=True
        )
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
    return False
