"""The scheduler process put together: engine, worker plane and gRPC servers, start to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos.quire.admin.v1 import admin_pb2, admin_pb2_grpc
from protos.quire.inference.v1 import inference_pb2, inference_pb2_grpc
from scheduler_svc.admission import Admission
from scheduler_svc.config import SchedulerServiceConfig
from scheduler_svc.constraint_pool import ConstraintPool
from scheduler_svc.core.messages import DEFAULT_TENANT
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine import Engine
from scheduler_svc.quotas import QuotaConfig, TenantQuotas
from scheduler_svc.recorder import Record, RecordingScheduler
from scheduler_svc.security_config import SecurityConfig
from scheduler_svc.servicers.admin import AdminServicer
from scheduler_svc.servicers.auth import AuthInterceptor, TokenBook
from scheduler_svc.servicers.errors import ErrorInterceptor
from scheduler_svc.servicers.generation import GenerationServicer
from scheduler_svc.servicers.health import HealthServicer
from scheduler_svc.servicers.model import ModelServicer
from scheduler_svc.servicers.tokenizer import TokenizerServicer
from scheduler_svc.tenancy import Tenancy
from scheduler_svc.text.constraint_compiler import ConstraintCompiler
from scheduler_svc.text.tokenizer import TextModel
from scheduler_svc.text_pool import TextPool
from scheduler_svc.workers import WorkerRegistry
from shared.errors import ConfigError, Unavailable
from shared.model_spec import ModelSpec
from shared.transport import RouterLink

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 << 20
"""The largest message taken from a client: some millions of token ids or characters, more than any
context holds. gRPC answers RESOURCE_EXHAUSTED above it. Its default of 4 MiB would refuse long
prompts; what is sent has no such limit, as streams bound their messages themselves."""
MAX_METADATA_BYTES = 16 << 10
"""The most metadata of one call. gRPC answers RESOURCE_EXHAUSTED above it."""
OTHER_CALLS = 256
"""Calls open at once besides Generate's own limit."""
WORKER_LEAVE_S = 3.0
"""How long the end waits for workers to say that they leave."""
CALLS_END_S = 0.5
"""How long the end waits for calls that are no streams, such as health watches."""
API_SERVICES = ("GenerationService", "TokenizerService", "ModelService")

_GRPC_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    # Between these two gRPC would refuse by chance.
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    # Two servers on one port would share its calls in silence.
    ("grpc.so_reuseport", 0),
    # Pings find clients that vanished without a word, so that their requests stop.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Clients may ping as often as that, also between calls.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


class SchedulerServer:
    """Everything of the process but signals and exit codes. Build and use on one event loop."""

    def __init__(
        self, config: SchedulerServiceConfig, spec: ModelSpec, text_model: TextModel
    ) -> None:
        """Binds the worker plane; ConfigError when that fails."""
        self._config = config
        now = time.monotonic()
        self._record = None if config.record is None else Record(config.record)
        self._link = RouterLink(
            config.workers.endpoint,
            secret=config.workers.secret,
            max_frame_bytes=config.workers.max_frame_bytes,
        )
        self._core_config = replace(config.core, vocab_size=spec.vocab_size)
        registry = WorkerRegistry(
            config.workers,
            model_fingerprint=spec.fingerprint,
            vocab_size=spec.vocab_size,
            # Above every epoch of an earlier run, whatever that run did in its milliseconds.
            first_epoch=time.time_ns() // 1_000_000,
            now=now,
        )
        self.engine = Engine(
            self._make_scheduler(),
            registry,
            self._link,
        )
        self._tokens = TokenBook(config.security.tokens)
        self._admin_tokens = TokenBook(config.security.admin_tokens)
        tenancy = Tenancy(
            has_tenants=config.security.tenants != {DEFAULT_TENANT},
            shares_prefixes=config.security.shares_prefixes,
        )
        admission = Admission(spec, tenancy=tenancy)
        self._text_pool = TextPool(text_model)
        compiler = ConstraintCompiler(text_model.vocabulary)
        self._constraints = ConstraintPool(compiler, has_tenants=tenancy.has_tenants)
        quotas = TenantQuotas(config.quotas or QuotaConfig())
        self._generation = GenerationServicer(
            self.engine,
            admission,
            text_model,
            self._text_pool,
            self._constraints,
            spec,
            self._tokens,
            quotas,
            max_streams=config.max_streams,
            max_detached_tokens=config.max_detached_tokens,
        )
        self._tokenizer = TokenizerServicer(admission, self._text_pool, self._tokens, quotas)
        self._model = ModelServicer(admission, spec, has_chat_template=text_model.has_chat_template)
        self._health = HealthServicer()
        self._tasks: list[asyncio.Task[None]] = []
        self._servers: list[grpc.aio.Server] = []
        self.worker_endpoint = self._link.endpoint
        self.address = config.listen
        self.admin_address = config.admin_listen

    def _make_scheduler(self) -> Scheduler:
        # Without the key nobody can tell which prompts share a block hash.
        hash_key = os.urandom(32)
        if self._record is None:
            return Scheduler(self._core_config, hash_key)
        return RecordingScheduler(self._core_config, hash_key, self._record)

    async def start(self) -> None:
        """Opens the ports and starts the engine; ConfigError when a port can't be had."""
        api = _new_server(self._tokens, self._config.max_streams + OTHER_CALLS)
        inference_pb2_grpc.add_GenerationServiceServicer_to_server(self._generation, api)
        inference_pb2_grpc.add_TokenizerServiceServicer_to_server(self._tokenizer, api)
        inference_pb2_grpc.add_ModelServiceServicer_to_server(self._model, api)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, api)
        services = [_full_name(inference_pb2, name) for name in API_SERVICES]
        reflection.enable_server_reflection(
            [*services, health.SERVICE_NAME, reflection.SERVICE_NAME], api
        )
        admin = _new_server(self._admin_tokens, OTHER_CALLS)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(
            AdminServicer(self.engine, self._generation), admin
        )
        reflection.enable_server_reflection(
            [_full_name(admin_pb2, "AdminService"), reflection.SERVICE_NAME], admin
        )
        security = self._config.security
        self.address = _bind(api, "--listen", self._config.listen, security)
        self.admin_address = _bind(admin, "--admin-listen", self._config.admin_listen, security)
        await self._set_health(["", *services])
        self._tasks = [
            asyncio.create_task(self.engine.run(), name="engine"),
            asyncio.create_task(self._follow_serving(["", *services]), name="health"),
        ]
        self._servers = [api, admin]
        for server in self._servers:
            await server.start()

    async def wait_defect(self) -> None:
        """Returns never unless a part of the process ends by a defect, which it raises."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def stop(self, grace_s: float) -> None:
        """Takes no new request, lets open streams end within `grace_s`, sends workers off, ends."""
        await self._health.enter_graceful_shutdown()
        self.engine.close_admission()
        try:
            await asyncio.wait_for(self._generation.wait_no_streams(), grace_s)
        except TimeoutError:
            log.warning("streams are still open after %g s and end now", grace_s)
        await self.close(send_workers_off=True)

    async def close(self, *, send_workers_off: bool = False) -> None:
        """Ends at once: open streams get UNAVAILABLE."""
        self.engine.fail_all(Unavailable("the server shut down", retry_after_s=1.0))
        if send_workers_off:
            self.engine.send_workers_off()
            await self._wait_workers_left()
        await asyncio.gather(*(server.stop(CALLS_END_S) for server in self._servers))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._generation.close()
        self._text_pool.close()
        self._constraints.close()
        self._link.close()
        if self._record is not None:
            self._record.close()

    async def _wait_workers_left(self) -> None:
        deadline_s = time.monotonic() + WORKER_LEAVE_S
        while self.engine.registry.members() and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)

    async def _follow_serving(self, services: Sequence[str]) -> None:
        """Keeps the health of every service at the engine's."""
        while True:
            await self.engine.serving_changed.wait()
            self.engine.serving_changed.clear()
            await self._set_health(services)

    async def _set_health(self, services: Sequence[str]) -> None:
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if self.engine.is_serving else statuses.NOT_SERVING
        for service in services:
            await self._health.set(service, status)


def _new_server(tokens: TokenBook, max_calls: int) -> grpc.aio.Server:
    interceptors: list[grpc.aio.ServerInterceptor] = [ErrorInterceptor()]
    if len(tokens):
        interceptors.insert(0, AuthInterceptor(tokens))
    return grpc.aio.server(
        interceptors=interceptors,
        options=(
            *_GRPC_OPTIONS,
            # Calls that come faster than they are taken: past 1,000, its default, gRPC would end
            # them at random with CANCELLED, which no client retries.
            ("grpc.server.max_pending_requests", 2 * max_calls),
            ("grpc.server.max_pending_requests_hard_limit", 4 * max_calls),
        ),
        maximum_concurrent_rpcs=max_calls,
    )


def _full_name(module: object, service: str) -> str:
    return str(module.DESCRIPTOR.services_by_name[service].full_name)  # type: ignore[attr-defined]


def _bind(server: grpc.aio.Server, flag: str, address: str, security: SecurityConfig) -> str:
    """Binds a port; gives the address with the actual port."""
    try:
        if security.tls_cert is None or security.tls_key is None:
            port = server.add_insecure_port(address)
        else:
            credentials = grpc.ssl_server_credentials(
                [(security.tls_key, security.tls_cert)],
                root_certificates=security.tls_client_ca,
                require_client_auth=security.tls_client_ca is not None,
            )
            port = server.add_secure_port(address, credentials)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{flag}: cannot listen at {address}: is the port in use, or the address wrong?"
        ) from error
    if address.startswith("unix:"):
        return address
    return f"{address.rpartition(':')[0]}:{port}"
