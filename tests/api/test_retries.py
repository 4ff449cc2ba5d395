"""A client's gRPC library repeats a call that has not started, and never one that has."""

from __future__ import annotations

import json

import grpc

from protos.quire.inference.v1 import inference_pb2_grpc
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.text.tokenizer import TextModel
from shared.model_spec import ModelSpec
from tests.api.fake_worker import continuation, joined, letter_after
from tests.api.serving import Answer, Served, error_of, opened, request, serving

RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": "quire.inference.v1.GenerationService"}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.3s",
                "maxBackoff": "0.3s",
                "backoffMultiplier": 1,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}


def patient(served: Served) -> grpc.aio.Channel:
    """A connection whose calls are repeated."""
    options = [("grpc.service_config", json.dumps(RETRIES)), ("grpc.enable_retries", 1)]
    return grpc.aio.insecure_channel(served.server.address, options)


async def counted(served: Served, counter: str) -> None:
    """Returns when the engine has counted one."""
    while not served.server.engine.counters[counter]:
        await served.status()


async def test_a_call_that_found_no_worker_is_repeated(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with serving(spec, text_model) as served, patient(served) as channel:
        call = inference_pb2_grpc.GenerationServiceStub(channel).Generate(request("hello"))
        await counted(served, "requests_refused")
        async with joined(served.worker()):
            got = Answer([response async for response in call])
        assert served.server.engine.counters["requests"] > 1
    assert got.kinds == ["started", "delta", "finished"]
    assert got.token_ids == continuation(b"hello", 8, letter_after)


async def test_a_call_that_waited_when_the_last_worker_died_is_repeated(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with serving(spec, text_model, core=SchedulerConfig(max_num_seqs=1)) as served:
        first = served.worker()
        await first.join()
        await served.wait_status(1)
        first.hold()
        running = await opened(served, request())
        async with patient(served) as channel:
            call = inference_pb2_grpc.GenerationServiceStub(channel).Generate(request("hello"))
            await served.wait_live(2)
            await first.kill()
            assert (await running.error()).code() is grpc.StatusCode.UNAVAILABLE
            async with joined(served.worker(worker_id="second")):
                got = Answer([response async for response in call])
    assert got.token_ids == continuation(b"hello", 8, letter_after)


async def test_a_call_that_has_started_is_never_repeated(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with serving(spec, text_model) as served, patient(served) as channel:
        worker = served.worker()
        await worker.join()
        await served.wait_status(1)
        worker.hold()
        call = inference_pb2_grpc.GenerationServiceStub(channel).Generate(request()).__aiter__()
        assert (await anext(call)).HasField("started")
        await worker.kill()
        error = await error_of(call)
        async with joined(served.worker(worker_id="second")):
            await served.wait_status(1)
        assert served.server.engine.counters["requests"] == 1
    assert error.code() is grpc.StatusCode.UNAVAILABLE
