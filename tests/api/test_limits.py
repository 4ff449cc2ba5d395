"""What a server takes at most, and how it refuses more."""

from __future__ import annotations

import ast

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2

from protos.quire.inference.v1 import inference_pb2
from scheduler_svc.admission import Admission
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.limits import Limits
from scheduler_svc.servicers.error_table import LIMITS
from scheduler_svc.text.tokenizer import TextModel
from shared.errors import InvalidArgument
from shared.model_spec import ModelSpec
from tests.api.fake_worker import joined
from tests.api.serving import (
    NOT_SERVING,
    OpenStream,
    detail,
    error_of,
    opened,
    request,
    serving,
    violated_field,
)
from tests.tree import ROOT, python_files

Ids = inference_pb2.TokenIds
Chat = inference_pb2.ChatPrompt
Turn = inference_pb2.ChatMessage


async def test_full_queues_are_resource_exhausted(spec: ModelSpec, text_model: TextModel) -> None:
    """FIELD-FAILURES part 4: no queue is unbounded."""
    core = SchedulerConfig(max_waiting=1, max_num_seqs=1)
    async with serving(spec, text_model, core=core, max_streams=3) as served:
        worker = served.worker()
        async with joined(worker):
            await served.wait_status(1)
            worker.hold()
            await opened(served, request())
            waiting = OpenStream(served, request())
            while served.server.engine.scheduler.num_waiting == 0:
                await served.status()
            too_many = await error_of(served.generation.Generate(request()))
            served.server.engine.scheduler.check_invariants()
            worker.release()
            assert (await waiting.rest()).finished.usage.num_output_tokens == 8
    assert too_many.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert detail(too_many, error_details_pb2.ErrorInfo).metadata["limit"] == "max_waiting"
    assert detail(too_many, error_details_pb2.RetryInfo).retry_delay.seconds >= 1


async def test_streams_have_a_limit(spec: ModelSpec, text_model: TextModel) -> None:
    async with serving(spec, text_model, max_streams=1) as served:
        worker = served.worker()
        async with joined(worker):
            await served.wait_status(1)
            worker.hold()
            open_stream = await opened(served, request())
            error = await error_of(served.generation.Generate(request()))
            open_stream.cancel()
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert detail(error, error_details_pb2.ErrorInfo).metadata["limit"] == "max_streams"


async def test_health_watches_have_a_limit(
    spec: ModelSpec, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Health asks for no token: whoever watches takes no calls from clients."""
    monkeypatch.setattr("scheduler_svc.servicers.health.MAX_WATCHES", 2)
    async with serving(spec, text_model) as served:
        watches = [served.health.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        assert [(await watch.read()).status for watch in watches] == [NOT_SERVING, NOT_SERVING]
        error = await error_of(served.health.Watch(health_pb2.HealthCheckRequest()))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail(error, error_details_pb2.ErrorInfo).metadata["limit"] == "max_health_watches"
        watches[0].cancel()
        await served.wait_status(NOT_SERVING)


async def test_large_messages_end_cleanly(spec: ModelSpec, text_model: TextModel) -> None:
    """FIELD-FAILURES part 2: messages over gRPC's default of 4 MiB are read; beyond the server's
    limit they are RESOURCE_EXHAUSTED."""
    async with serving(spec, text_model) as served:
        long_prompt = request(token_ids=Ids(ids=[1] * (5 << 20)))
        assert violated_field(await error_of(served.generation.Generate(long_prompt))) == (
            "token_ids"
        )
        too_long = request("x" * (17 << 20))
        error = await error_of(served.generation.Generate(too_long))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_giant_headers_are_refused(spec: ModelSpec, text_model: TextModel) -> None:
    """FIELD-FAILURES part 4: giant headers; the connection and others' calls live on."""
    ask = inference_pb2.ListModelsRequest()
    async with serving(spec, text_model) as served:
        large = (("x-filler", "x" * (15 << 10)),)
        assert (await served.models.ListModels(ask, metadata=large)).models
        giant = (("x-filler", "x" * (17 << 10)),)
        error = await error_of(served.models.ListModels(ask, metadata=giant))
        assert (await served.models.ListModels(ask)).models
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_texts_are_bounded_before_they_are_tokenized(spec: ModelSpec) -> None:
    """FIELD-FAILURES part 4: huge prompts cost no thread."""
    limits = Limits(max_text_bytes=100, max_token_ids=8, max_chat_messages=2)
    admission = Admission(spec, limits)
    turn = Turn(role="user", content="é" * 23)
    fits = [request("é" * 50), request(chat=Chat(messages=[turn, turn]))]
    for message in fits:
        admission.check(message)
    beyond = [
        ("text", request("é" * 50 + "x")),
        ("chat.messages", request(chat=Chat(messages=[turn, Turn(role="user", content="é" * 24)]))),
        ("chat.messages", request(chat=Chat(messages=[Turn(role="r" * 101, content="x")]))),
        ("chat.messages", request(chat=Chat(messages=[turn] * 3))),
    ]
    for field, message in beyond:
        with pytest.raises(InvalidArgument) as caught:
            admission.check(message)
        assert caught.value.field == field
    admission.check_num_token_ids("token_ids", [1] * 8)
    with pytest.raises(InvalidArgument):
        admission.check_num_token_ids("token_ids", [1] * 9)


async def test_texts_that_wait_for_a_thread_have_a_limit(
    spec: ModelSpec, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_svc.text_pool.MAX_PENDING", 0)
    async with serving(spec, text_model) as served:
        error = await error_of(served.tokenizer.Tokenize(inference_pb2.TokenizeRequest(text="x")))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    info = detail(error, error_details_pb2.ErrorInfo)
    assert info.metadata["limit"] == "max_pending_text_calls"


def test_every_limit_that_is_raised_has_its_line_in_the_table() -> None:
    raised = set()
    for file in python_files("scheduler_svc"):
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            match node:
                case ast.Call(func=ast.Name(id="ResourceExhausted"), args=[ast.Constant(name), *_]):
                    raised.add(name)
    assert raised == set(LIMITS)
