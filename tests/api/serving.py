"""A server in this process, its clients, and shorthands for calls and what they give."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from protos.quire.admin.v1 import admin_pb2, admin_pb2_grpc
from protos.quire.inference.v1 import inference_pb2, inference_pb2_grpc
from scheduler_svc.config import SchedulerServiceConfig, WorkerPlaneConfig
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.quotas import QuotaConfig
from scheduler_svc.security_config import SecurityConfig
from scheduler_svc.server import SchedulerServer
from scheduler_svc.text.tokenizer import TextModel
from shared.model_spec import ModelSpec
from tests.api.fake_worker import FakeWorker

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass
class Served:
    """A running server and stubs for it."""

    server: SchedulerServer
    spec: ModelSpec
    channel: grpc.aio.Channel
    generation: Any
    tokenizer: Any
    models: Any
    admin: Any
    health: Any

    def worker(self, **changes: Any) -> FakeWorker:
        """A worker of this server, not yet joined."""
        return FakeWorker(self.server.worker_endpoint, self.spec.fingerprint, **changes)

    async def status(self) -> int:
        answer = await self.health.Check(health_pb2.HealthCheckRequest())
        return int(answer.status)

    async def state(self) -> admin_pb2.GetEngineStateResponse:
        """What the operator sees."""
        return await self.admin.GetEngineState(admin_pb2.GetEngineStateRequest())

    async def wait_status(self, status: int) -> None:
        """Returns when the health of the whole server is `status`."""
        async for answer in self.health.Watch(health_pb2.HealthCheckRequest()):
            if answer.status == status:
                return

    async def wait_live(self, num_requests: int) -> None:
        """Returns when the core holds so many requests."""
        while len(list(self.server.engine.scheduler.live_requests())) != num_requests:
            await self.status()

    async def wait_idle(self) -> None:
        """Returns when nothing runs, waits, is on its way, or holds a block."""
        is_idle = False
        while not is_idle:
            state = await self.state()
            is_idle = state.num_waiting + state.num_running + state.num_swapped == 0 and all(
                replica.num_steps_in_flight == 0
                and replica.num_free_blocks + replica.num_cached_blocks == replica.num_blocks
                for replica in state.replicas
            )


@contextlib.asynccontextmanager
async def serving(
    spec: ModelSpec,
    text_model: TextModel,
    *,
    listen: str = "127.0.0.1:0",
    security: SecurityConfig | None = None,
    max_streams: int = 100,
    max_detached_tokens: int = 1 << 20,
    core: SchedulerConfig | None = None,
    quotas: QuotaConfig | None = None,
    record: Path | None = None,
    **worker_plane: Any,
) -> AsyncIterator[Served]:
    """A started server on free ports; closed at the end."""
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        config = SchedulerServiceConfig(
            model_path=spec.path,
            listen=listen,
            admin_listen="127.0.0.1:0",
            max_streams=max_streams,
            max_detached_tokens=max_detached_tokens,
            security=security or SecurityConfig(),
            core=core or SchedulerConfig(),
            quotas=quotas,
            record=record,
            workers=replace(
                WorkerPlaneConfig(
                    endpoint=f"ipc://{Path(folder) / 'workers.sock'}", heartbeat_interval_s=0.2
                ),
                **worker_plane,
            ),
        )
        server = SchedulerServer(config, spec, text_model)
        await server.start()
        try:
            async with (
                grpc.aio.insecure_channel(server.address) as channel,
                grpc.aio.insecure_channel(server.admin_address) as admin_channel,
            ):
                yield Served(
                    server,
                    spec,
                    channel,
                    inference_pb2_grpc.GenerationServiceStub(channel),
                    inference_pb2_grpc.TokenizerServiceStub(channel),
                    inference_pb2_grpc.ModelServiceStub(channel),
                    admin_pb2_grpc.AdminServiceStub(admin_channel),
                    health_pb2_grpc.HealthStub(channel),
                )
        finally:
            await server.close()


def request(
    text: str = "hello", *, max_tokens: int | None = 8, stop: tuple[str, ...] = (), **fields: Any
) -> inference_pb2.GenerateRequest:
    """A request; `fields` overwrite the message's."""
    stopping = inference_pb2.StoppingParams(max_tokens=max_tokens, stop_strings=stop)
    prompt = {} if {"token_ids", "chat"} & fields.keys() else {"text": text}
    return inference_pb2.GenerateRequest(**{"stopping": stopping, **prompt, **fields})


@dataclass
class Answer:
    """A whole stream, by kind of event."""

    responses: list[inference_pb2.GenerateResponse]

    @property
    def kinds(self) -> list[str]:
        """The kinds of events, with repeated deltas as one."""
        kinds: list[str] = []
        for response in self.responses:
            kind = response.WhichOneof("event")
            assert kind is not None
            if kind != "delta" or kinds[-1:] != ["delta"]:
                kinds.append(kind)
        return kinds

    @property
    def deltas(self) -> list[inference_pb2.Delta]:
        return [response.delta for response in self.responses if response.HasField("delta")]

    @property
    def token_ids(self) -> list[int]:
        """All ids, after a check that each delta starts where the last one ended."""
        token_ids: list[int] = []
        for delta in self.deltas:
            assert delta.offset == len(token_ids)
            token_ids += delta.token_ids
        return token_ids

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def started(self) -> inference_pb2.Started:
        return self.responses[0].started

    @property
    def finished(self) -> inference_pb2.Finished:
        return self.responses[-1].finished


async def answer(
    served: Served, message: inference_pb2.GenerateRequest, metadata: Any = None
) -> Answer:
    """Reads a stream to its end."""
    call = served.generation.Generate(message, metadata=metadata)
    return Answer([response async for response in call])


class OpenStream:
    """A stream that is read a piece at a time."""

    def __init__(
        self, served: Served, message: inference_pb2.GenerateRequest, metadata: Any = None
    ) -> None:
        self._open(served.generation.Generate(message, metadata=metadata))

    @classmethod
    def of(cls, call: Any) -> OpenStream:
        """The stream of a call that was made already."""
        stream = cls.__new__(cls)
        stream._open(call)
        return stream

    def _open(self, call: Any) -> None:
        self._call = call
        self._iterator = call.__aiter__()
        self._responses: list[inference_pb2.GenerateResponse] = []

    async def read(self) -> inference_pb2.GenerateResponse:
        """The next response."""
        self._responses.append(await anext(self._iterator))
        return self._responses[-1]

    async def rest(self) -> Answer:
        """Everything, also what was read before."""
        self._responses += [response async for response in self._iterator]
        return Answer(self._responses)

    async def error(self) -> grpc.aio.AioRpcError:
        """The error that the stream ends with."""
        return await error_of(self._iterator)

    async def refused(self) -> bool:
        """Whether the stream, not read yet, ends with RESOURCE_EXHAUSTED in place of a response."""
        try:
            await self.read()
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
            return True
        return False

    def cancel(self) -> None:
        self._call.cancel()


async def opened(
    served: Served, message: inference_pb2.GenerateRequest, metadata: Any = None
) -> OpenStream:
    """A stream whose request has started."""
    stream = OpenStream(served, message, metadata)
    assert (await stream.read()).HasField("started")
    return stream


async def error_of(call: Any) -> grpc.aio.AioRpcError:
    """The error that a call or stream ends with; fails when there is none."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call succeeded")


def detail(error: grpc.aio.AioRpcError, kind: Any) -> Any:
    """The detail of one kind in an error's rich status."""
    status = rpc_status.from_call(error)
    assert status is not None, error
    for packed in status.details:
        found = kind()
        if packed.Unpack(found):
            return found
    raise AssertionError(f"no {kind.__name__} in {status}")


def violated_field(error: grpc.aio.AioRpcError) -> str:
    """The field path of an INVALID_ARGUMENT."""
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
    (violation,) = detail(error, error_details_pb2.BadRequest).field_violations
    return str(violation.field)
