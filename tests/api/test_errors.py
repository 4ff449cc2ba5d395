"""Each refusal has its status, its details, and changes nothing for others."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2

from protos.quire.inference.v1 import inference_pb2
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.text.detokenizer import SequenceText
from scheduler_svc.text.tokenizer import TextModel
from shared.model_spec import ModelSpec
from tests.api.fake_worker import joined
from tests.api.serving import (
    NOT_SERVING,
    answer,
    detail,
    error_of,
    opened,
    request,
    serving,
    violated_field,
)
from tests.api.tiny_model import CONTEXT_LENGTH, VOCAB_SIZE

Ids = inference_pb2.TokenIds
Chat = inference_pb2.ChatPrompt
Turn = inference_pb2.ChatMessage
Sampling = inference_pb2.SamplingParams
Stopping = inference_pb2.StoppingParams
NAN, INF = float("nan"), float("inf")

BAD_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("text", {"text": ""}),
    ("text", {"text": "x" * CONTEXT_LENGTH}),
    ("token_ids", {"token_ids": Ids()}),
    ("token_ids", {"token_ids": Ids(ids=[1] * CONTEXT_LENGTH)}),
    ("token_ids.ids[1]", {"token_ids": Ids(ids=[1, VOCAB_SIZE])}),
    ("token_ids.ids[0]", {"token_ids": Ids(ids=[2**32 - 1])}),
    ("chat.messages", {"chat": Chat()}),
    ("chat.messages[0].role", {"chat": Chat(messages=[Turn(content="x")])}),
    ("chat.messages", {"chat": Chat(messages=[Turn(role="unknown", content="x")])}),
    ("sampling.temperature", {"sampling": Sampling(temperature=-1)}),
    ("sampling.temperature", {"sampling": Sampling(temperature=NAN)}),
    ("sampling.temperature", {"sampling": Sampling(temperature=INF)}),
    ("sampling.temperature", {"sampling": Sampling(temperature=100.5)}),
    ("sampling.top_k", {"sampling": Sampling(top_k=VOCAB_SIZE + 1)}),
    ("sampling.top_p", {"sampling": Sampling(top_p=0)}),
    ("sampling.top_p", {"sampling": Sampling(top_p=1.5)}),
    ("sampling.top_p", {"sampling": Sampling(top_p=NAN)}),
    ("sampling.min_p", {"sampling": Sampling(min_p=-0.1)}),
    ("sampling.min_p", {"sampling": Sampling(min_p=NAN)}),
    ("sampling.n", {"sampling": Sampling(n=0)}),
    ("sampling.n", {"sampling": Sampling(n=17)}),
    ("sampling.first_choice", {"sampling": Sampling(first_choice=(1 << 20) + 1)}),
    ("stopping.max_tokens", {"stopping": Stopping(max_tokens=0)}),
    ("stopping.stop_strings", {"stopping": Stopping(stop_strings=["x"] * 17)}),
    ("stopping.stop_strings[1]", {"stopping": Stopping(stop_strings=["x", ""])}),
    ("stopping.stop_strings[0]", {"stopping": Stopping(stop_strings=["é" * 129])}),
    ("stopping.stop_token_ids", {"stopping": Stopping(stop_token_ids=[1] * 65)}),
    ("stopping.stop_token_ids[0]", {"stopping": Stopping(stop_token_ids=[VOCAB_SIZE])}),
    ("request_id", {"request_id": "i" * 129}),
    ("cache_salt", {"cache_salt": "s" * 129}),
    ("priority", {"priority": 101}),
    ("priority", {"priority": -101}),
]


async def test_each_broken_limit_is_named(spec: ModelSpec, text_model: TextModel) -> None:
    """FIELD-FAILURES part 4: NaN, -1, top_p 0, ids beyond the vocabulary in prompt and
    stop_token_ids, empty and huge prompts, huge n."""
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        for field, fields in BAD_REQUESTS:
            error = await error_of(served.generation.Generate(request(**fields)))
            assert violated_field(error) == field, (fields, error)
        no_prompt = inference_pb2.GenerateRequest()
        assert violated_field(await error_of(served.generation.Generate(no_prompt))) == "prompt"
        assert (await answer(served, request())).kinds == ["started", "delta", "finished"]


async def test_values_on_the_limits_pass(spec: ModelSpec, text_model: TextModel) -> None:
    edges = request(
        "x" * (CONTEXT_LENGTH - 1),
        sampling=Sampling(temperature=100, top_k=VOCAB_SIZE, top_p=1, min_p=1, seed=2**64 - 1),
        stopping=Stopping(
            max_tokens=1, stop_strings=["é" * 128] * 16, stop_token_ids=[VOCAB_SIZE - 1] * 64
        ),
        request_id="i" * 128,
        cache_salt="s" * 128,
        priority=-100,
    )
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        assert (await answer(served, edges)).kinds == ["started", "delta", "finished"]


async def test_another_model_is_not_found(spec: ModelSpec, text_model: TextModel) -> None:
    async with serving(spec, text_model) as served:
        calls = [
            served.generation.Generate(request(model="other")),
            served.models.GetModel(inference_pb2.GetModelRequest(name="other")),
            served.tokenizer.Tokenize(inference_pb2.TokenizeRequest(model="other", text="x")),
        ]
        for call in calls:
            error = await error_of(call)
            assert error.code() is grpc.StatusCode.NOT_FOUND
            assert "'other'" in error.details() and repr(spec.name) in error.details()


async def test_words_of_the_client_in_an_error_are_cut_and_made_text(
    spec: ModelSpec, text_model: TextModel
) -> None:
    """A status goes out in metadata, of which gRPC takes 8 KiB, and in UTF-8."""
    wide = "\U0001f600" * 15_000
    unknown = json.dumps({"properties": {wide: {"nullable": True}}}, ensure_ascii=False)
    half = r'{"properties": {"\ud800": {"nullable": true}}}'
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        error = await error_of(served.models.GetModel(inference_pb2.GetModelRequest(name=wide)))
        assert error.code() is grpc.StatusCode.NOT_FOUND and "\U0001f600..." in error.details()
        in_base64 = sum(4 * len(value) / 3 for _, value in error.trailing_metadata())
        assert in_base64 + len(quote(error.details())) < 8192
        for schema, words in (
            (unknown, "\U0001f600..."),
            (half, r"/properties/\ud800: 'nullable'"),
        ):
            error = await error_of(served.generation.Generate(request(json_schema=schema)))
            assert violated_field(error) == "json_schema"
            violations = detail(error, error_details_pb2.BadRequest).field_violations
            assert words in violations[0].description and words in error.details()


async def test_without_a_worker_unavailable_comes_at_once(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with serving(spec, text_model) as served:
        error = await error_of(served.generation.Generate(request()))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert detail(error, error_details_pb2.RetryInfo).retry_delay.seconds == 1
    assert detail(error, error_details_pb2.ErrorInfo).reason == "UNAVAILABLE"


async def test_an_id_in_use_already_exists(spec: ModelSpec, text_model: TextModel) -> None:
    """FIELD-FAILURES part 2: the same request id twice; the first is intact."""
    same: dict[str, Any] = {"max_tokens": 4, "request_id": "mine"}
    async with serving(spec, text_model) as served:
        worker = served.worker()
        async with joined(worker):
            await served.wait_status(1)
            worker.hold()
            first = await opened(served, request(**same))
            error = await error_of(served.generation.Generate(request(**same)))
            worker.release()
            got = await first.rest()
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert got.finished.usage.num_output_tokens == 4


async def test_health_lists_every_service(spec: ModelSpec, text_model: TextModel) -> None:
    async with serving(spec, text_model) as served:
        listed = await served.health.List(health_pb2.HealthListRequest())
    services = ("GenerationService", "ModelService", "TokenizerService")
    names = ["", *(f"quire.inference.v1.{service}" for service in services)]
    assert {name: answer.status for name, answer in listed.statuses.items()} == dict.fromkeys(
        names, NOT_SERVING
    )


async def test_a_sequence_that_fails_alone_is_aborted(
    spec: ModelSpec, text_model: TextModel
) -> None:
    """FIELD-FAILURES part 1: an error in one sequence's prefill reaches its client."""
    async with serving(spec, text_model) as served:
        worker = served.worker(fail_when=lambda token_ids: token_ids[0] == ord("!"))
        async with joined(worker):
            await served.wait_status(1)
            good = await opened(served, request("fine", max_tokens=100))
            error = await error_of(served.generation.Generate(request("!bad")))
            got = await good.rest()
    assert error.code() is grpc.StatusCode.ABORTED
    assert "made to fail" in error.details()
    assert got.finished.usage.num_output_tokens == 100


async def test_a_defect_of_the_core_ends_the_process_and_not_in_silence(
    spec: ModelSpec,
    text_model: TextModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        stream = await opened(served, request(max_tokens=200))
        monkeypatch.setattr(Scheduler, "apply_result", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await served.server.wait_defect()
        error = await stream.error()
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "the engine stops on a defect: 1 live requests" in caplog.text


async def test_a_defect_of_one_call_tells_the_client_a_log_id_alone(
    spec: ModelSpec,
    text_model: TextModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A bug in one call, or in one request's stream, is its own: the service goes on."""
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        with monkeypatch.context() as patch:
            patch.setattr(TextModel, "encode", lambda *_, **__: 1 / 0)
            internal = await error_of(served.generation.Generate(request()))
        with monkeypatch.context() as patch:
            # Decoded as they come where there are stop strings, else when they are written.
            for decoding in ("append", "decode"):
                patch.setattr(SequenceText, decoding, lambda *_: 1 / 0)
            aborted = await error_of(served.generation.Generate(request(stop=("never",))))
            unwritten = await error_of(served.generation.Generate(request()))
        assert (await answer(served, request())).kinds == ["started", "delta", "finished"]
        await served.wait_idle()
    assert internal.code() is grpc.StatusCode.INTERNAL
    assert unwritten.code() is grpc.StatusCode.INTERNAL
    assert aborted.code() is grpc.StatusCode.ABORTED
    for error in (internal, unwritten, aborted):
        log_id = error.details().rpartition(" ")[2]
        assert log_id in caplog.text
        assert "ZeroDivisionError" not in error.details()
    assert "ZeroDivisionError" in caplog.text
