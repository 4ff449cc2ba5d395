"""Who leaves is forgotten: cancels, deadlines, reused ids, slow readers, no leaks."""

from __future__ import annotations

import asyncio

import grpc

from protos.quire.inference.v1 import inference_pb2
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.text.tokenizer import TextModel
from shared.ids import RequestId
from shared.model_spec import ModelSpec
from tests.api.fake_worker import continuation, joined, letter_after
from tests.api.serving import OpenStream, answer, error_of, opened, request, serving


async def test_a_cancelled_stream_stops_in_the_next_plan(
    spec: ModelSpec, text_model: TextModel
) -> None:
    """FIELD-FAILURES part 2: the client leaves after 3 tokens; IDLE within two steps."""
    async with serving(spec, text_model) as served:
        worker = served.worker()
        async with joined(worker):
            await served.wait_status(1)
            stream = await opened(served, request(max_tokens=200))
            num_tokens = 0
            while num_tokens < 3:
                num_tokens += len((await stream.read()).delta.token_ids)
            worker.hold()
            stream.cancel()
            await served.wait_live(0)
            num_plans = len(worker.plans)
            worker.release()
            await served.wait_idle()
    # Two plans were in flight at most; after these none computes the sequence again.
    assert all(plan.num_tokens == 0 for plan in worker.plans[num_plans + 2 :])


async def test_a_waiting_request_can_be_cancelled(spec: ModelSpec, text_model: TextModel) -> None:
    """FIELD-FAILURES part 2: cancel while waiting."""
    core = SchedulerConfig(max_num_seqs=1)
    async with serving(spec, text_model, core=core) as served:
        worker = served.worker()
        async with joined(worker):
            await served.wait_status(1)
            worker.hold()
            running = await opened(served, request())
            waiting = OpenStream(served, request())
            await served.wait_live(2)
            waiting.cancel()
            await served.wait_live(1)
            worker.release()
            assert (await running.rest()).finished.usage.num_output_tokens == 8
            await served.wait_idle()


async def test_an_id_can_be_used_again_right_after_a_cancel(
    spec: ModelSpec, text_model: TextModel
) -> None:
    """FIELD-FAILURES part 2: cancel and reuse at once: the new one completes."""
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        for _ in range(20):
            first = await opened(served, request("first", request_id="same", max_tokens=200))
            first.cancel()
            second = await answer(served, request("second", request_id="same", max_tokens=4))
            assert second.token_ids == continuation(b"second", 4, letter_after)


async def test_fifty_cancels_leave_no_task_behind(spec: ModelSpec, text_model: TextModel) -> None:
    """FIELD-FAILURES part 2: handlers leak after cancel."""
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        await answer(served, request())
        baseline = len(asyncio.all_tasks())
        for _ in range(50):
            (await opened(served, request(max_tokens=200))).cancel()
        await served.wait_live(0)
        await served.wait_idle()
        while len(asyncio.all_tasks()) > baseline:
            await served.status()


async def test_the_deadline_of_a_call_ends_its_request(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with serving(spec, text_model) as served:
        worker = served.worker()
        async with joined(worker):
            await served.wait_status(1)
            worker.hold()
            error = await error_of(served.generation.Generate(request(), timeout=0.2))
            await served.wait_live(0)
            worker.release()
            await served.wait_idle()
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_queue_timeout_ends_a_waiting_request(
    spec: ModelSpec, text_model: TextModel
) -> None:
    core = SchedulerConfig(max_num_seqs=1)
    async with serving(spec, text_model, core=core) as served:
        worker = served.worker()
        async with joined(worker):
            await served.wait_status(1)
            worker.hold()
            running = await opened(served, request(queue_timeout_ms=50))
            error = await error_of(served.generation.Generate(request(queue_timeout_ms=50)))
            worker.release()
            assert (await running.rest()).finished.usage.num_output_tokens == 8
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "waited" in error.details()


async def test_an_operator_cancels_a_request(spec: ModelSpec, text_model: TextModel) -> None:
    async with serving(spec, text_model) as served:
        worker = served.worker()
        async with joined(worker):
            await served.wait_status(1)
            worker.hold()
            stream = await opened(served, request(request_id="mine"))
            served.server.engine.cancel(RequestId("mine"))
            got = await stream.rest()
            worker.release()
            await served.wait_idle()
    assert got.finished.reason == inference_pb2.FINISH_REASON_CANCELLED


async def test_a_slow_reader_holds_up_nobody(spec: ModelSpec, text_model: TextModel) -> None:
    """FIELD-FAILURES part 2: a reader that takes one message and rests; others keep their rate."""
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        slow = await opened(served, request("slow", max_tokens=200))
        quick = await answer(served, request("quick", max_tokens=200))
        await served.wait_idle()
        late = await slow.rest()
    assert quick.token_ids == continuation(b"quick", 200, letter_after)
    assert late.token_ids == continuation(b"slow", 200, letter_after)
