"""Requests that outlive their calls: nothing lost, nothing doubled, nothing kept for ever."""

from __future__ import annotations

import asyncio
import random

import grpc
import pytest

from protos.quire.inference.v1 import inference_pb2
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.text.tokenizer import TextModel
from shared.model_spec import ModelSpec
from tests.api.detaching import ABORT, attach, detachable, numbers, some, until_detached
from tests.api.fake_worker import FakeWorker, continuation, joined, letter_after
from tests.api.serving import (
    Answer,
    OpenStream,
    answer,
    error_of,
    opened,
    request,
    serving,
)


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
