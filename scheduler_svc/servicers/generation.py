"""GenerationService: a call in, one request to the engine, its stream out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import grpc

from protos.quire.inference.v1 import inference_pb2, inference_pb2_grpc
from scheduler_svc.admission import Admission, AdmittedRequest, num_sequences_of
from scheduler_svc.constraint_pool import ConstraintPool
from scheduler_svc.detached import DetachedRequests, KeptStream
from scheduler_svc.engine import Engine
from scheduler_svc.inbox import Abort, StopSequence, Submit
from scheduler_svc.quotas import Lease, TenantQuotas
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
        max_detached_tokens: int,
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
        self._detached = DetachedRequests(
            max_detached_tokens, lambda stream: engine.post(Abort(stream.request_id, stream))
        )
        self._clock = clock
        self._pacer = WritePacer(clock)
        self._num_streams = 0
        self._no_streams = asyncio.Event()
        self._no_streams.set()

    @property
    def num_streams(self) -> int:
        """Calls that are open."""
        return self._num_streams

    @property
    def num_detachable(self) -> int:
        """Requests that can be attached to."""
        return len(self._detached)

    async def wait_no_streams(self) -> None:
        """Returns when no call is open."""
        await self._no_streams.wait()

    def close(self) -> None:
        """Forgets the requests that could be attached to."""
        self._detached.close()

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Streams one request. A cancel of the call is raised here, and aborts the request unless
        it is to be detached."""
        arrival_s = self._clock()
        tenant = self._tokens.tenant_of_call(context)
        with self._stream_slot():
            self._admission.check(request)
            lease = self._quotas.enter(tenant, *num_sequences_of(request))
            try:
                eos_token_ids = self._admission.eos_token_ids(request)
                admitted = self._admission.admit(
                    request,
                    await self._prompt_token_ids(request),
                    constraint=await self._constraints.compile(request, eos_token_ids, tenant),
                    bad_words=await self._bad_words(request),
                    tenant=tenant,
                    deadline_s=context.time_remaining(),
                )
                self._detached.check_free(admitted.request.request_id)
                lease.charge(admitted.request.most_tokens)
                stream = self._new_stream(admitted, arrival_s, lease)
            except BaseException:
                lease.close(0)
                raise
            self._engine.post(Submit(admitted.request, stream))
            if isinstance(stream, KeptStream):
                await self._serve_kept(stream, context, 0, inference_pb2.DISCONNECT_POLICY_DETACH)
            else:
                await self._serve(stream, context, admitted.request.request_id, lease)

    async def Attach(  # noqa: N802
        self, request: inference_pb2.AttachRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Streams the rest of a request that may be detached; NotFound when there is none."""
        with self._stream_slot():
            tenant = self._tokens.tenant_of_call(context)
            request_id, policy = self._admission.check_attach(request, tenant)
            stream = self._detached.take(request_id, request.after_event)
            await self._serve_kept(stream, context, request.after_event, policy)

    @contextlib.contextmanager
    def _stream_slot(self) -> Iterator[None]:
        """One of the streams that may be open at once."""
        if self._num_streams >= self._max_streams:
            raise ResourceExhausted(
                "max_streams", f"{self._max_streams} streams are open", RETRY_AFTER_S
            )
        self._num_streams += 1
        self._no_streams.clear()
        try:
            yield
        finally:
            self._num_streams -= 1
            if self._num_streams == 0:
                self._no_streams.set()

    async def _prompt_token_ids(self, request: inference_pb2.GenerateRequest) -> list[int]:
        kind = request.WhichOneof("prompt")
        if kind == "text":
            return await self._text_pool.encode(request.text)
        if kind == "chat":
            turns = [(message.role, message.content) for message in request.chat.messages]
            return (await self._text_pool.render_chat(turns))[1]
        return list(request.token_ids.ids)

    async def _bad_words(self, request: inference_pb2.GenerateRequest) -> Sequence[tuple[int, ...]]:
        words = request.sampling.bad_words
        return await self._text_pool.bad_word_ids(words) if words else ()

    def _new_stream(
        self, admitted: AdmittedRequest, arrival_s: float, lease: Lease
    ) -> RequestStream:
        """A request's stream; one that may be detached is kept, and closes the lease by itself."""
        request = admitted.request
        parts: dict[str, Any] = {
            "model_name": self._spec.name,
            "new_text": partial(
                self._text_model.stream,
                request.prompt_token_ids,
                admitted.stop_strings,
                include_stop_string=admitted.include_stop_string,
                min_tokens=admitted.min_tokens,
            ),
            "stop_sequence": lambda index: self._engine.post(
                StopSequence(request.request_id, index, stream)
            ),
            "pacer": self._pacer,
            "arrival_s": arrival_s,
        }
        stream: RequestStream
        if admitted.detach_ttl_s is None:
            stream = RequestStream(admitted, **parts)
        else:
            stream = KeptStream(
                admitted,
                ttl_s=admitted.detach_ttl_s,
                on_end=lambda ended: lease.close(ended.num_used_tokens),
                **parts,
            )
            self._detached.add(stream)
        return stream

    async def _serve(
        self,
        stream: RequestStream,
        context: grpc.aio.ServicerContext,
        request_id: RequestId,
        lease: Lease,
    ) -> None:
        """Writes a stream that ends with its call."""
        try:
            await asyncio.create_task(stream.write_all(context.write))
        finally:
            if not stream.is_ended:
                self._engine.post(Abort(request_id, stream))
            lease.close(stream.num_used_tokens)

    async def _serve_kept(
        self,
        stream: KeptStream,
        context: grpc.aio.ServicerContext,
        after_event: int,
        policy: inference_pb2.DisconnectPolicy,
    ) -> None:
        """Writes a stream that another call may take up."""
        try:
            await stream.serve(context.write, after_event)
        finally:
            self._detached.left(stream, policy)
