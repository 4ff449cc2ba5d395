"""GenerationService: a call in, one request to the engine, its stream out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

import grpc

from protos.quire.inference.v1 import inference_pb2, inference_pb2_grpc
from scheduler_svc.admission import Admission, AdmittedRequest, num_sequences_of
from scheduler_svc.constraint_pool import ConstraintPool
from scheduler_svc.core.messages import DEFAULT_TENANT
from scheduler_svc.engine import Engine
from scheduler_svc.inbox import Abort, StopSequence, Submit
from scheduler_svc.quotas import TenantQuotas
from scheduler_svc.servicers.auth import TokenBook
from scheduler_svc.streams import RequestStream
from scheduler_svc.text.tokenizer import TextModel
from scheduler_svc.text_pool import TextPool
from scheduler_svc.write_pacer import WritePacer
from shared.errors import ResourceExhausted
from shared.ids import RequestId
from shared.model_spec import ModelSpec

RETRY_AFTER_S = 1.0


class GenerationServicer(inference_pb2_grpc.GenerationServiceServicer):
    """Streams tokens. Errors are raised, and mapped to statuses by the interceptor."""

    def __init__(
        self,
        engine: Engine,
        admission: Admission,
        text_model: TextModel,
        text_pool: TextPool,
        constraints: ConstraintPool,
        spec: ModelSpec,
        tokens: TokenBook,
        quotas: TenantQuotas,
        *,
        max_streams: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._text_model = text_model
        self._text_pool = text_pool
        self._constraints = constraints
        self._spec = spec
        self._tokens = tokens
        self._quotas = quotas
        self._max_streams = max_streams
        self._clock = clock
        self._pacer = WritePacer(clock)
        self._num_streams = 0
        self._no_streams = asyncio.Event()
        self._no_streams.set()

    async def wait_no_streams(self) -> None:
        """Returns when no call is open."""
        await self._no_streams.wait()

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Streams one request. A cancel of the call is raised here, and aborts the request."""
        arrival_s = self._clock()
        if self._num_streams >= self._max_streams:
            raise ResourceExhausted(
                "max_streams", f"{self._max_streams} streams are open", RETRY_AFTER_S
            )
        self._num_streams += 1
        self._no_streams.clear()
        try:
            await self._generate(request, context, arrival_s)
        finally:
            self._num_streams -= 1
            if self._num_streams == 0:
                self._no_streams.set()

    async def _generate(
        self,
        message: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext,
        arrival_s: float,
    ) -> None:
        """A call that found a stream free: the tenant's quota is held until the call ends."""
        tenant = self._tokens.tenant_of(context.invocation_metadata() or ()) or DEFAULT_TENANT
        self._admission.check(message)
        lease = self._quotas.enter(tenant, *num_sequences_of(message))
        num_used_tokens = 0
        try:
            eos_token_ids = self._admission.eos_token_ids(message)
            admitted = self._admission.admit(
                message,
                await self._prompt_token_ids(message),
                constraint=await self._constraints.compile(message, eos_token_ids),
                tenant=tenant,
                deadline_s=context.time_remaining(),
            )
            lease.charge(admitted.request.most_tokens)
            stream = self._new_stream(admitted, arrival_s)
            try:
                await self._stream(admitted.request.request_id, stream, context)
            finally:
                num_used_tokens = stream.num_used_tokens
        finally:
            lease.close(num_used_tokens)

    async def _prompt_token_ids(self, request: inference_pb2.GenerateRequest) -> list[int]:
        kind = request.WhichOneof("prompt")
        if kind == "text":
            return await self._text_pool.encode(request.text)
        if kind == "chat":
            turns = [(message.role, message.content) for message in request.chat.messages]
            return (await self._text_pool.render_chat(turns))[1]
        return list(request.token_ids.ids)

    def _new_stream(self, admitted: AdmittedRequest, arrival_s: float) -> RequestStream:
        """Submits a request; gives its stream."""
        request = admitted.request
        stream = RequestStream(
            admitted,
            model_name=self._spec.name,
            new_text=partial(
                self._text_model.stream, request.prompt_token_ids, admitted.stop_strings
            ),
            stop_sequence=lambda index: self._engine.post(
                StopSequence(request.request_id, index, stream)
            ),
            pacer=self._pacer,
            arrival_s=arrival_s,
        )
        self._engine.post(Submit(request, stream))
        return stream

    async def _stream(
        self, request_id: RequestId, stream: RequestStream, context: grpc.aio.ServicerContext
    ) -> None:
        try:
            while (message := await stream.next_message()) is not None:
                await context.write(message)
        finally:
            if not stream.is_ended:
                self._engine.post(Abort(request_id, stream))
