"""Requests that outlive their calls: nothing lost, nothing doubled, nothing kept for ever."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from protos.quire.inference.v1 import inference_pb2
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.quotas import Quota, QuotaConfig
from scheduler_svc.security_config import ClientToken, SecurityConfig
from scheduler_svc.text.tokenizer import TextModel
from shared.model_spec import ModelSpec
from tests.api.fake_worker import FakeWorker, continuation, joined, letter_after
from tests.api.serving import (
    Answer,
    OpenStream,
    Served,
    answer,
    detail,
    error_of,
    opened,
    request,
    serving,
    violated_field,
)

DETACH = inference_pb2.DISCONNECT_POLICY_DETACH
ABORT = inference_pb2.DISCONNECT_POLICY_ABORT
Responses = list[inference_pb2.GenerateResponse]


def detachable(text: str = "hello", **fields: Any) -> inference_pb2.GenerateRequest:
    return request(text, **{"request_id": "mine", "disconnect": DETACH, **fields})


def attach(served: Served, after_event: int, *, metadata: Any = None, **fields: Any) -> Any:
    message = inference_pb2.AttachRequest(
        **{"request_id": "mine", "after_event": after_event, **fields}
    )
    return served.generation.Attach(message, metadata=metadata)


async def some(call: Any, num_events: int) -> Responses:
    """Reads so many events, or to the end, and then cancels the call."""
    responses: Responses = []
    while len(responses) < num_events:
        response = await call.read()
        if response is grpc.aio.EOF:
            break
        responses.append(response)
    call.cancel()
    return responses


def numbers(responses: Responses) -> list[int]:
    return [response.event_number for response in responses]


async def until_detached(served: Served, num_streams: int = 0) -> None:
    """Returns when but so many calls are open."""
    while (await served.state()).num_streams > num_streams:
        await served.status()


async def forgotten(served: Served) -> None:
    """Returns when nothing can be attached to."""
    while (await served.state()).num_detachable:
        await asyncio.sleep(0.05)


async def test_a_detached_request_goes_on_and_is_taken_up(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with serving(spec, text_model) as served:
        worker = served.worker(hold_after=lambda plan: plan.step == 20)
        async with joined(worker):
            await served.wait_status(1)
            first = await some(served.generation.Generate(detachable(max_tokens=100)), 2)
            await until_detached(served)
            await worker.held.wait()
            assert len(list(served.server.engine.scheduler.live_requests())) == 1
            worker.release()
            await served.wait_idle()
            rest = [response async for response in attach(served, first[-1].event_number)]
            whole = [response async for response in attach(served, 0)]
    got = Answer([*first, *rest])
    assert got.token_ids == continuation(b"hello", 100, letter_after)
    assert got.kinds == ["started", "delta", "finished"]
    assert numbers(got.responses) == list(range(1, len(got.responses) + 1))
    assert whole == got.responses
    assert served.server.engine.counters["requests"] == 1


async def step_every(seconds: float, worker: FakeWorker) -> None:
    """Lets a worker go on that holds after each step."""
    while True:
        await asyncio.sleep(seconds)
        worker.release()


@pytest.mark.parametrize("seed", range(4))
async def test_whoever_comes_back_again_and_again_misses_nothing(
    spec: ModelSpec, text_model: TextModel, seed: int
) -> None:
    """Whatever breaks and whenever: each choice is what it is in one piece."""
    rng = random.Random(seed)
    sampling = inference_pb2.SamplingParams(n=3)
    stopping = inference_pb2.StoppingParams(max_tokens=100, stop_strings=["zz", "qy"])
    message = detachable("é hello", sampling=sampling, stopping=stopping)
    async with serving(spec, text_model) as served:
        worker = served.worker(hold_after=lambda _: True)
        async with joined(worker):
            await served.wait_status(1)
            paced = asyncio.create_task(step_every(0.002, worker))
            responses = await some(served.generation.Generate(message), 1)
            while sum(response.HasField("finished") for response in responses) < 3:
                call = attach(served, responses[-1].event_number)
                responses += await some(call, rng.randrange(5))
            paced.cancel()
            worker.hold_after = lambda _: False
            worker.release()
            await served.wait_idle()
            plain = await answer(served, request("é hello", sampling=sampling, stopping=stopping))
    assert numbers(responses) == list(range(1, len(responses) + 1))
    for index in range(3):
        choice, alone = (
            Answer([r for r in some if r.sequence_index == index])
            for some in (responses, plain.responses)
        )
        assert (choice.token_ids, choice.text) == (alone.token_ids, alone.text)
        assert choice.finished.reason == alone.finished.reason
        assert choice.finished.usage.num_output_tokens == alone.finished.usage.num_output_tokens


async def test_a_beam_search_can_be_detached(spec: ModelSpec, text_model: TextModel) -> None:
    beam = inference_pb2.BeamParams(width=3, num_return=2)
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        first = await some(served.generation.Generate(detachable(beam=beam)), 1)
        rest = [response async for response in attach(served, 1)]
        plain = await answer(served, request(beam=beam))
    assert first[0].HasField("started")
    for mine, theirs in zip(rest, plain.responses[1:], strict=True):
        assert mine.delta == theirs.delta
        assert mine.finished.beam_score == theirs.finished.beam_score


async def test_a_worker_that_dies_meanwhile_is_survived(
    spec: ModelSpec, text_model: TextModel
) -> None:
    """Detached on one replica, taken up on another: the client hears Recovered in its place."""
    core = SchedulerConfig(no_replica_grace_s=10.0)
    async with serving(spec, text_model, core=core) as served:
        first_worker = served.worker(hold_after=lambda plan: plan.step == 20)
        await first_worker.join()
        await served.wait_status(1)
        first = await some(served.generation.Generate(detachable(max_tokens=100)), 2)
        await until_detached(served)
        await first_worker.kill()
        async with joined(served.worker(worker_id="second")):
            rest = [response async for response in attach(served, first[-1].event_number)]
    got = Answer([*first, *rest])
    assert got.token_ids == continuation(b"hello", 100, letter_after)
    assert "recovered" in got.kinds


async def test_the_newest_call_has_the_stream(spec: ModelSpec, text_model: TextModel) -> None:
    """A client whose connection died unseen comes back: the old call must not be in its way."""
    async with serving(spec, text_model) as served:
        worker = served.worker()
        async with joined(worker):
            await served.wait_status(1)
            worker.hold()
            old = await opened(served, detachable())
            middle = attach(served, 1)
            assert (await old.error()).code() is grpc.StatusCode.ABORTED
            new = attach(served, 0)
            assert (await error_of(middle)).code() is grpc.StatusCode.ABORTED
            worker.release()
            got = Answer([response async for response in new])
    assert got.token_ids == continuation(b"hello", 8, letter_after)


@pytest.mark.parametrize("is_held", [True, False])
async def test_nothing_is_left_after_the_time_to_live(
    spec: ModelSpec, text_model: TextModel, is_held: bool
) -> None:
    """A running request is aborted, the events of an ended one are forgotten: IDLE, NOT_FOUND."""
    async with serving(spec, text_model) as served:
        worker = served.worker()
        async with joined(worker):
            await served.wait_status(1)
            if is_held:
                worker.hold()
            await some(served.generation.Generate(detachable(detach_ttl_s=1)), 1)
            await until_detached(served)
            again = detachable(detach_ttl_s=1)
            in_use = await error_of(served.generation.Generate(again))
            await forgotten(served)
            await served.wait_live(0)
            worker.release()
            await served.wait_idle()
            gone = await error_of(attach(served, 0))
            assert (await answer(served, again)).kinds == ["started", "delta", "finished"]
    assert in_use.code() is grpc.StatusCode.ALREADY_EXISTS
    assert gone.code() is grpc.StatusCode.NOT_FOUND


async def test_the_deadline_of_a_call_bounds_the_call_alone(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with serving(spec, text_model) as served:
        worker = served.worker()
        async with joined(worker):
            await served.wait_status(1)
            worker.hold()
            error = await error_of(served.generation.Generate(detachable(), timeout=0.2))
            await until_detached(served)
            worker.release()
            got = Answer([response async for response in attach(served, 0)])
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert got.token_ids == continuation(b"hello", 8, letter_after)


async def test_a_detached_request_is_stopped_by_a_call_that_says_so(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with serving(spec, text_model) as served:
        worker = served.worker()
        async with joined(worker):
            await served.wait_status(1)
            worker.hold()
            await some(served.generation.Generate(detachable()), 1)
            await some(attach(served, 0, disconnect=ABORT), 1)
            await served.wait_live(0)
            worker.release()
            await served.wait_idle()
            assert (await error_of(attach(served, 0))).code() is grpc.StatusCode.NOT_FOUND


async def test_a_request_waits_while_it_is_detached(spec: ModelSpec, text_model: TextModel) -> None:
    async with serving(spec, text_model, core=SchedulerConfig(max_num_seqs=1)) as served:
        worker = served.worker()
        async with joined(worker):
            await served.wait_status(1)
            worker.hold()
            running = await opened(served, request("other"))
            call = served.generation.Generate(detachable())
            await served.wait_live(2)
            call.cancel()
            await until_detached(served, num_streams=1)
            worker.release()
            await running.rest()
            got = Answer([response async for response in attach(served, 0)])
    assert got.token_ids == continuation(b"hello", 8, letter_after)


async def test_what_was_refused_is_not_kept(spec: ModelSpec, text_model: TextModel) -> None:
    """A client's gRPC library may repeat it under the same id."""
    async with serving(spec, text_model) as served:
        for _ in range(2):
            error = await error_of(served.generation.Generate(detachable()))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert (await served.state()).num_detachable == 0


async def test_a_failure_is_told_to_whoever_attaches(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with serving(spec, text_model) as served:
        worker = served.worker()
        await worker.join()
        await served.wait_status(1)
        worker.hold()
        await some(served.generation.Generate(detachable()), 1)
        await worker.kill()
        await served.wait_live(0)
        for _ in range(2):
            call = OpenStream.of(attach(served, 0))
            assert (await call.read()).HasField("started")
            assert (await call.error()).code() is grpc.StatusCode.UNAVAILABLE


async def test_another_tenant_finds_nothing(spec: ModelSpec, text_model: TextModel) -> None:
    """No word tells a request of another tenant's from one that never was."""
    tokens = (ClientToken(b"one", "acme"), ClientToken(b"two", "other"))
    acme, other = ((("authorization", f"Bearer {name}"),) for name in ("one", "two"))
    async with serving(spec, text_model, security=SecurityConfig(tokens=tokens)) as served:
        worker = served.worker()
        async with joined(worker):
            await served.wait_status(1)
            await some(served.generation.Generate(detachable(), metadata=acme), 1)
            theirs = await error_of(attach(served, 0, metadata=other))
            nobodys = await error_of(attach(served, 0, request_id="none", metadata=other))
            got = [response async for response in attach(served, 0, metadata=acme)]
    assert theirs.code() is nobodys.code() is grpc.StatusCode.NOT_FOUND
    assert theirs.details() == nobodys.details()
    assert Answer(got).finished.usage.num_output_tokens == 8


async def test_kept_tokens_have_a_limit(spec: ModelSpec, text_model: TextModel) -> None:
    """A request counts for all it may come to, and from its end on for what it came to."""
    async with (
        serving(spec, text_model, max_detached_tokens=350) as served,
        joined(served.worker()),
    ):
        await served.wait_status(1)
        whole = await answer(served, request(max_tokens=200))
        stopped = detachable(max_tokens=200, stop=(whole.text[:3],))
        assert (await answer(served, stopped)).finished.stop_string
        second = detachable(request_id="second", max_tokens=200, detach_ttl_s=1)
        assert (await answer(served, second)).finished.usage.num_output_tokens == 200
        third = detachable(request_id="third", max_tokens=200)
        error = await error_of(served.generation.Generate(third))
        while (await served.state()).num_detachable > 1:
            await asyncio.sleep(0.05)
        assert (await answer(served, third)).finished.usage.num_output_tokens == 200
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert detail(error, error_details_pb2.ErrorInfo).metadata["limit"] == "max_detached_tokens"


async def test_log_probabilities_count_as_further_tokens(
    spec: ModelSpec, text_model: TextModel
) -> None:
    """Of 32 at each place the events are six times as large."""
    response = inference_pb2.ResponseOptions(num_logprobs=32)
    async with serving(spec, text_model, max_detached_tokens=300) as served:
        heavy = detachable(max_tokens=50, response=response)
        error = await error_of(served.generation.Generate(heavy))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        light = await error_of(served.generation.Generate(detachable(max_tokens=50)))
    assert light.code() is grpc.StatusCode.UNAVAILABLE  # no worker: it was let in


async def test_an_ended_request_is_kept_at_no_cost_to_its_tenants_quota(
    spec: ModelSpec, text_model: TextModel
) -> None:
    quotas = QuotaConfig(others=Quota(requests=1, tokens=100))
    async with serving(spec, text_model, quotas=quotas) as served, joined(served.worker()):
        await served.wait_status(1)
        for name in ("a", "b"):
            await answer(served, detachable(request_id=name, max_tokens=90))
        assert (await served.state()).num_detachable == 2


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("disconnect", {"disconnect": 9}),
        ("detach_ttl_s", {"detach_ttl_s": 3601}),
        ("detach_ttl_s", {"disconnect": ABORT, "detach_ttl_s": 1}),
    ],
)
async def test_wrong_policies_are_named(
    spec: ModelSpec, text_model: TextModel, field: str, fields: dict[str, Any]
) -> None:
    async with serving(spec, text_model) as served:
        error = await error_of(served.generation.Generate(detachable(**fields)))
    assert violated_field(error) == field


async def test_wrong_attach_calls_are_named(spec: ModelSpec, text_model: TextModel) -> None:
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        whole = await answer(served, detachable(detach_ttl_s=3600))
        beyond = attach(served, len(whole.responses) + 1)
        assert violated_field(await error_of(beyond)) == "after_event"
        assert violated_field(await error_of(attach(served, 0, disconnect=9))) == "disconnect"
        too_long = attach(served, 0, request_id="x" * 129)
        assert violated_field(await error_of(too_long)) == "request_id"
        assert [r async for r in attach(served, len(whole.responses))] == []
