"""What the operator sees and steers."""

from __future__ import annotations

import grpc

from protos.quire.admin.v1 import admin_pb2
from protos.quire.inference.v1 import inference_pb2
from scheduler_svc.text.tokenizer import TextModel
from shared.model_spec import ModelSpec
from tests.api.fake_worker import joined
from tests.api.serving import (
    NOT_SERVING,
    SERVING,
    OpenStream,
    answer,
    error_of,
    opened,
    request,
    serving,
)


async def test_the_state_shows_what_runs_and_what_is_held(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with serving(spec, text_model) as served:
        worker = served.worker()
        async with joined(worker):
            await served.wait_status(SERVING)
            await answer(served, request("x" * 40))
            await served.wait_idle()
            idle = await served.admin.GetEngineState(admin_pb2.GetEngineStateRequest())
            worker.hold()
            await opened(served, request("y" * 40, request_id="mine"))
            busy = await served.admin.GetEngineState(admin_pb2.GetEngineStateRequest())
            live = await served.admin.ListRequests(admin_pb2.ListRequestsRequest())
            workers = await served.admin.ListWorkers(admin_pb2.ListWorkersRequest())
            worker.release()
    (replica,) = idle.replicas
    assert (idle.num_waiting, idle.num_running, idle.num_swapped) == (0, 0, 0)
    assert replica.num_free_blocks + replica.num_cached_blocks == replica.num_blocks == 64
    assert replica.num_cached_blocks > 0
    assert replica.num_steps >= 8
    assert replica.schedule_s > 0
    assert replica.execute_s > 0
    assert idle.counters["requests_finished"] == 1
    assert busy.num_running == busy.replicas[0].num_running == 1
    assert busy.replicas[0].num_steps_in_flight == 2
    (mine,) = live.requests
    assert (mine.request_id, mine.state, mine.num_prompt_tokens) == ("mine", "RUNNING", 40)
    (member,) = workers.workers
    assert (member.worker_id, member.device) == ("worker-0", "cpu")
    assert member.state == admin_pb2.WORKER_STATE_READY
    assert member.epoch == worker.epoch


async def test_paused_admission_refuses_and_lets_live_requests_end(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(SERVING)
        stream = await opened(served, request(max_tokens=100))
        await served.admin.PauseAdmission(admin_pb2.PauseAdmissionRequest())
        error = await error_of(served.generation.Generate(request()))
        await served.wait_status(NOT_SERVING)
        assert (await stream.rest()).finished.usage.num_output_tokens == 100
        await served.admin.ResumeAdmission(admin_pb2.ResumeAdmissionRequest())
        await served.wait_status(SERVING)
        await answer(served, request())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "paused" in error.details()


async def test_open_calls_are_seen_in_tasks_until_they_end(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with serving(spec, text_model) as served:
        worker = served.worker()
        async with joined(worker):
            await served.wait_status(SERVING)
            worker.hold()
            streams = [OpenStream(served, request()) for _ in range(8)]
            while (held := await served.state()).num_streams < 8:
                pass
            assert held.num_tasks > 8 and held.num_threads >= 1
            worker.release()
            for stream in streams:
                await stream.rest()
            while (await served.state()).num_tasks > held.num_tasks - 8:
                pass


async def test_a_flushed_prefix_is_computed_again(spec: ModelSpec, text_model: TextModel) -> None:
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(SERVING)
        await answer(served, request("x" * 40))
        await served.wait_idle()
        flushed = await served.admin.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest())
        again = await answer(served, request("x" * 40))
    assert flushed.num_blocks > 0
    assert again.started.num_cached_tokens == 0


async def test_requests_and_workers_are_steered_by_name(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with serving(spec, text_model) as served:
        worker = served.worker()
        async with joined(worker):
            await served.wait_status(SERVING)
            stream = await opened(served, request(request_id="mine", max_tokens=200))
            await served.admin.CancelRequest(admin_pb2.CancelRequestRequest(request_id="mine"))
            cancelled = await stream.rest()
            no_request = await error_of(
                served.admin.CancelRequest(admin_pb2.CancelRequestRequest(request_id="mine"))
            )
            await served.admin.DrainWorker(admin_pb2.DrainWorkerRequest(worker_id="worker-0"))
            await worker.left.wait()
            await served.wait_status(NOT_SERVING)
            no_worker = await error_of(
                served.admin.DrainWorker(admin_pb2.DrainWorkerRequest(worker_id="other"))
            )
    assert cancelled.finished.reason == inference_pb2.FINISH_REASON_CANCELLED
    assert no_request.code() is no_worker.code() is grpc.StatusCode.NOT_FOUND


async def test_a_request_is_explained_while_it_lives_and_after(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(SERVING)
        await answer(served, request(request_id="mine"))
        story = await served.admin.ExplainRequest(
            admin_pb2.ExplainRequestRequest(request_id="mine")
        )
        unknown = await error_of(
            served.admin.ExplainRequest(admin_pb2.ExplainRequestRequest(request_id="other"))
        )
    assert (story.is_live, story.num_dropped_events) == (False, 0)
    assert [event.text.split()[0] for event in story.events] == ["submitted", "runs", "finished"]
    assert story.events[0].after_s == 0 < story.events[-1].after_s
    assert not story.events[0].HasField("sequence_index")
    assert unknown.code() is grpc.StatusCode.NOT_FOUND
