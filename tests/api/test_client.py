"""The Python client, sync and async, against a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from protos.quire.inference.v1 import inference_pb2
from quire_client import (
    Answer,
    AsyncClient,
    CallError,
    Cancelled,
    Client,
    ClientConfig,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    SequenceAnswer,
    Unauthenticated,
    Unavailable,
    call_error,
    generate_request,
)
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.security_config import ClientToken, SecurityConfig
from scheduler_svc.text.tokenizer import TextModel
from shared.model_spec import ModelSpec
from tests.api.fake_worker import continuation, joined, letter_after
from tests.api.serving import serving

HELLO = bytes(continuation(b"hello", 8, letter_after)).decode()


async def test_an_answer_as_texts_as_events_and_whole(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        async with AsyncClient(served.server.address) as client:
            generation = client.generate("hello", max_tokens=8)
            assert "".join([text async for text in generation.texts()]) == HELLO
            events = [event async for event in client.generate("hello", max_tokens=8)]
            kinds = [event.WhichOneof("event") for event in events]
            assert kinds[0] == "started" and kinds[-1] == "finished"
            answer = await client.generate(list(b"hello"), n=2, max_tokens=8).result()
        assert answer.text == answer.sequences[1].text == HELLO
        assert answer.token_ids == list(HELLO.encode())
        assert answer.first.finish_reason == "MAX_TOKENS" and answer.first.beam_score is None
        assert answer.started is not None and answer.started.sampling.n == 2


async def test_the_blocking_client_gives_the_same(spec: ModelSpec, text_model: TextModel) -> None:
    def use(address: str) -> None:
        with Client(address) as client:
            assert "".join(client.generate("hello", max_tokens=8).texts()) == HELLO
            whole = client.generate(generate_request("hello", max_tokens=8)).result()
            assert whole.text == HELLO
            with client.generate("hello", max_tokens=4000) as broken_off:
                next(iter(broken_off))
            ids = client.tokenize("ab")
            assert ids == [97, 98] and client.detokenize(ids) == "ab"
            chat = [{"role": "user", "content": "x"}]
            assert client.render_chat(chat).text == "[user] x\n[assistant] "
            assert client.generate(chat, max_tokens=1).result().started is not None
            assert [model.name for model in client.models()] == [client.model().name]
            with pytest.raises(NotFound):
                client.model("other")

    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        await asyncio.to_thread(use, served.server.address)
        await served.wait_idle()


async def error_of_client(call: Callable[[AsyncClient], Any], address: str) -> CallError:
    async with AsyncClient(ClientConfig(address, max_attempts=1)) as client:
        with pytest.raises(CallError) as raised:
            await call(client)
    return raised.value


async def test_errors_are_typed_and_say_what_to_change(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with serving(spec, text_model, core=SchedulerConfig(max_waiting=2)) as served:
        address = served.server.address
        error = await error_of_client(lambda c: c.generate("x").result(), address)
        assert isinstance(error, Unavailable) and error.retry_delay_s == 1.0
        async with joined(served.worker()):
            await served.wait_status(1)
            error = await error_of_client(lambda c: c.generate("x", top_p=2).result(), address)
            assert isinstance(error, InvalidArgument)
            assert [violation.field for violation in error.field_violations] == ["sampling.top_p"]
            error = await error_of_client(lambda c: c.tokenize("x", model="no"), address)
            assert isinstance(error, NotFound)
    async with serving(spec, text_model, max_streams=1) as served, joined(served.worker()):
        await served.wait_status(1)
        async with AsyncClient(served.server.address) as client:
            held = client.generate("hello", max_tokens=200)
            await anext(aiter(held))
            error = await error_of_client(lambda c: c.generate("x").result(), served.server.address)
            assert isinstance(error, ResourceExhausted)
            assert error.limit == "max_streams" and error.retry_delay_s is not None
            held.cancel()
            await served.wait_idle()


async def test_a_call_is_tried_again_until_a_worker_is_there(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with serving(spec, text_model) as served:
        config = ClientConfig(served.server.address, max_attempts=5, initial_backoff_s=0.5)
        async with AsyncClient(config) as client:
            whole = asyncio.create_task(client.generate("hello", max_tokens=8).result())
            while not served.server.engine.counters["requests_refused"]:
                await served.status()
            async with joined(served.worker()):
                assert (await whole).text == HELLO


async def test_a_cancel_frees_the_server_and_raises_its_own_error(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        async with AsyncClient(served.server.address) as client:
            generation = client.generate("hello", max_tokens=4000)
            with pytest.raises(Cancelled):
                async for event in generation:
                    if event.HasField("delta"):
                        generation.cancel()
            await served.wait_idle()
            reading = asyncio.create_task(client.generate("hello", max_tokens=4000).result())
            await served.wait_live(1)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            await served.wait_idle()


async def test_a_broken_stream_is_taken_up_where_it_broke(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        async with AsyncClient(served.server.address) as client:
            async with client.generate(
                "hello",
                request_id="kept",
                max_tokens=8,
                disconnect=inference_pb2.DISCONNECT_POLICY_DETACH,
                detach_ttl_s=10,
            ) as broken_off:
                await anext(aiter(broken_off))
            assert broken_off.answer.started is not None and not broken_off.answer.token_ids
            whole = await client.attach("kept", broken_off.answer).result()
            assert whole.text == HELLO and whole.first.finish_reason == "MAX_TOKENS"
            with pytest.raises(NotFound):
                await client.attach("unknown").result()


async def test_a_token_goes_along(spec: ModelSpec, text_model: TextModel) -> None:
    security = SecurityConfig(tokens=(ClientToken(b"one"),))
    async with serving(spec, text_model, security=security) as served:
        async with AsyncClient(served.server.address) as client:
            with pytest.raises(Unauthenticated):
                await client.models()
        async with AsyncClient(ClientConfig(served.server.address, token="one")) as client:
            assert len(await client.models()) == 1


def test_requests_take_fields_of_the_contract_alone() -> None:
    request = generate_request("x", temperature=0.5, max_tokens=3, priority=2)
    assert request.sampling.temperature == 0.5
    assert (request.stopping.max_tokens, request.priority) == (3, 2)
    with pytest.raises(ValueError, match="temprature"):
        generate_request("x", temprature=1)
    with pytest.raises(ValueError, match="no further parameters"):
        Client().generate(request, max_tokens=1)


async def test_an_answer_tells_log_probabilities_usage_and_what_stopped_it(
    spec: ModelSpec, text_model: TextModel
) -> None:
    """Both clients put it together alike, and each event has its part."""
    parameters = {"max_tokens": 8, "n": 2, "num_logprobs": 2, "num_prompt_logprobs": 0}

    def block(address: str) -> Answer:
        with Client(address) as client:
            return client.generate("hello", **parameters).result()

    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        async with AsyncClient(served.server.address) as client:
            generation = client.generate("hello", **parameters)
            events = [event async for event in generation]
            stopped = await client.generate("hello", stop_strings=[HELLO[2:4]]).result()
            ended = await client.generate("hello", stop_token_ids=[ord(HELLO[3])]).result()
        answers = (generation.answer, await asyncio.to_thread(block, served.server.address))
    for answer in answers:
        assert answer.prompt_token_ids == list(b"ello")
        assert len(answer.prompt_logprobs.log_probs) == 4
        assert len(answer.logprobs.log_probs) == 8 and len(answer.logprobs.top_token_ids) == 16
        for sequence in answer.sequences.values():
            assert sequence.logprobs == answer.logprobs
            assert sequence.usage is not None and sequence.usage.num_output_tokens == 8
            assert sequence.finish_reason == "MAX_TOKENS" and sequence.stopped_by is None
    told = [
        value
        for event in events
        if not event.sequence_index
        for value in event.delta.logprobs.log_probs
    ]
    assert [told] * 2 == [list(answer.logprobs.log_probs) for answer in answers]
    assert stopped.first.finish_reason == "STOP_STRING" and stopped.first.stopped_by == HELLO[2:4]
    assert ended.first.finish_reason == "STOP_TOKEN"
    assert ended.first.stopped_by == ord(HELLO[3]) and ended.text == HELLO[:3]


def test_a_sequence_that_goes_on_has_no_end_yet() -> None:
    sequence = SequenceAnswer()
    assert sequence.usage is None and sequence.stopped_by is None


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({"delta": inference_pb2.Delta(offset=1, token_ids=[1])}, "from 1 on came after 0"),
        ({"prompt_logprobs": inference_pb2.PromptLogprobs(offset=3)}, "from 3 on came after 1"),
    ],
)
def test_lost_and_doubled_tokens_are_seen(event: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Answer().add(inference_pb2.GenerateResponse(**event))


@pytest.mark.parametrize("metadata", [None, (("grpc-status-details-bin", b"\xff\xff"),)])
def test_an_error_without_readable_details_is_still_typed(metadata: Any) -> None:
    raw = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, None, metadata, details="gone")
    error = call_error(raw)
    assert isinstance(error, Unavailable) and str(error) == "gone"
    assert error.retry_delay_s is None and error.field_violations == ()
