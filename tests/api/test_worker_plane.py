"""Workers come, go, die, hang, lie and come back; no stream loses or doubles a token."""

from __future__ import annotations

import asyncio
import time

import grpc
from google.rpc import error_details_pb2

from protos.quire.admin.v1 import admin_pb2
from protos.quire.worker.v1 import worker_pb2
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.membership import WorkerState
from scheduler_svc.text.tokenizer import TextModel
from shared.codec import PROTOCOL_VERSION
from shared.model_spec import ModelSpec
from tests.api.fake_worker import continuation, joined, letter_after
from tests.api.serving import (
    NOT_SERVING,
    SERVING,
    OpenStream,
    Served,
    answer,
    detail,
    error_of,
    opened,
    request,
    serving,
)


def letters(prompt: str, num_tokens: int) -> list[int]:
    return continuation(prompt.encode(), num_tokens, letter_after)


async def count(served: Served, counter: str, at_least: int = 1) -> None:
    """Returns when the registry has counted so many."""
    while served.server.engine.registry.counters[counter] < at_least:
        await served.status()


async def test_the_only_worker_dies_and_all_end_unavailable(
    spec: ModelSpec, text_model: TextModel
) -> None:
    """FIELD-FAILURES part 3: running, waiting and just-sent requests end UNAVAILABLE within 2 s,
    with heartbeats as in production; service is back when a worker is."""
    core = SchedulerConfig(max_num_seqs=1)
    async with serving(spec, text_model, core=core, heartbeat_interval_s=0.5) as served:
        worker = served.worker()
        async with joined(worker):
            await served.wait_status(SERVING)
            worker.hold()
            running = await opened(served, request())
            waiting = OpenStream(served, request())
            while served.server.engine.scheduler.num_waiting == 0:
                await served.status()
            await worker.kill()
            died_s = time.monotonic()
            just_sent = served.generation.Generate(request())
            errors = [await running.error(), await waiting.error(), await error_of(just_sent)]
            assert time.monotonic() - died_s < 2
        for error in errors:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert detail(error, error_details_pb2.RetryInfo).retry_delay.seconds == 1
        await served.wait_status(NOT_SERVING)
        async with joined(served.worker(incarnation=2)):
            await served.wait_status(SERVING)
            assert (await answer(served, request("again"))).token_ids == letters("again", 8)


async def test_with_a_second_worker_streams_go_on(spec: ModelSpec, text_model: TextModel) -> None:
    """FIELD-FAILURES part 3: with a second replica they go on as the same request alone."""
    prompts = [f"prompt {number}" for number in range(6)]
    async with serving(spec, text_model) as served:
        workers = [served.worker(worker_id=f"worker-{index}") for index in range(2)]
        async with joined(*workers):
            while served.server.engine.registry.num_ready < 2:
                await served.status()
            streams = [await opened(served, request(p, max_tokens=100)) for p in prompts]
            for stream in streams:
                await stream.read()  # before the hold: no token would come after it
            for worker in workers:
                worker.hold()
            await workers[0].kill()
            await count(served, "workers_lost")
            workers[1].release()
            answers = [await stream.rest() for stream in streams]
            await served.wait_idle()
    assert [got.token_ids for got in answers] == [letters(prompt, 100) for prompt in prompts]
    assert any("recovered" in got.kinds for got in answers)
    for got in answers:
        for response in got.responses:
            if response.HasField("recovered"):
                assert response.recovered.offset <= 100


async def test_a_silent_worker_is_lost(spec: ModelSpec, text_model: TextModel) -> None:
    """FIELD-FAILURES part 3: a stopped worker turns health NOT_SERVING within three heartbeats,
    and cancels are still answered meanwhile; when it wakes up it must register again."""
    async with serving(spec, text_model) as served:
        worker = served.worker()
        async with joined(worker):
            await served.wait_status(SERVING)
            worker.hold()
            stream = await opened(served, request())
            other = OpenStream(served, request())
            await served.wait_live(2)
            worker.mute()
            other.cancel()
            await served.wait_live(1)
            error = await stream.error()
            await served.wait_status(NOT_SERVING)
            await worker.send(worker_pb2.WorkerMessage(heartbeat=worker_pb2.WorkerHeartbeat()))
            await count(served, "worker_frames_unknown_peer")
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_worker_without_progress_is_lost(spec: ModelSpec, text_model: TextModel) -> None:
    """Alive and progressing are told apart: heartbeats alone do not save a stuck worker."""
    async with serving(spec, text_model, hang_timeout_s=0.6) as served:
        worker = served.worker()
        async with joined(worker):
            await served.wait_status(SERVING)
            await asyncio.sleep(0.8)  # idle is no hang
            worker.hold()
            error = await (await opened(served, request())).error()
            worker.release()
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_worker_that_never_gets_ready_is_dropped(
    spec: ModelSpec, text_model: TextModel
) -> None:
    """FIELD-FAILURES part 3: a worker that never gets ready times out."""
    async with serving(spec, text_model, load_timeout_s=0.3) as served:
        worker = served.worker()
        await worker.register()
        registry = served.server.engine.registry
        while registry.members():
            heartbeat = worker_pb2.WorkerHeartbeat(load_fraction=0.5)
            await worker.send(worker_pb2.WorkerMessage(heartbeat=heartbeat))
            await served.status()
        await worker.kill()


async def test_a_restarted_worker_replaces_its_old_membership(
    spec: ModelSpec, text_model: TextModel
) -> None:
    """FIELD-FAILURES part 3: 20 kills under load: a new epoch each time, first plan arrives."""
    epochs = set()
    core = SchedulerConfig(max_replica_losses=100)
    async with serving(spec, text_model, core=core) as served:
        spare = served.worker(worker_id="spare")
        spare_epoch = 0
        async with joined(spare):
            await served.wait_status(SERVING)
            spare_epoch = spare.epoch
            streams = [
                await opened(served, request(f"p{number}", max_tokens=200)) for number in range(2)
            ]
            spare.hold()
            for incarnation in range(20):
                worker = served.worker(incarnation=incarnation)
                await worker.join()
                epochs.add(worker.epoch)
                got = await answer(served, request("x" * incarnation + "y", max_tokens=2))
                assert len(got.token_ids) == 2
                assert worker.plans[0].step == 1
                await worker.kill()
            spare.release()
            answers = [await stream.rest() for stream in streams]
    assert len(epochs) == 20
    assert spare_epoch < min(epochs)
    assert [got.token_ids for got in answers] == [letters(f"p{n}", 200) for n in range(2)]


async def test_two_workers_of_one_name_do_not_take_turns(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with serving(spec, text_model) as served:
        first, second = served.worker(incarnation=1), served.worker(incarnation=2)
        async with joined(first, second):
            await first.register()
        assert first.refusal is not None and "rename" in first.refusal


async def test_unfit_workers_are_refused_with_a_sentence(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with serving(spec, text_model, max_workers=1) as served:
        for changes, word in (
            ({"protocol_version": PROTOCOL_VERSION + 1}, "protocol version"),
            ({"model_fingerprint": "other"}, "model files"),
            ({"worker_id": ""}, "name"),
            ({"worker_id": "w" * 65}, "name"),
            ({"world_size": 2, "rank": 1}, "ranks"),
        ):
            worker = served.worker()
            await worker.register(**changes)
            assert worker.refusal is not None and word in worker.refusal
            await worker.kill()
        async with joined(served.worker()):
            other = served.worker(worker_id="other")
            await other.register()
            assert other.refusal is not None and "limit of 1" in other.refusal
            await other.kill()


async def test_bad_frames_are_dropped_and_counted(spec: ModelSpec, text_model: TextModel) -> None:
    """What workers send is untrusted: nothing of it disturbs a stream."""
    async with serving(spec, text_model) as served:
        worker, stranger = served.worker(), served.worker(worker_id="stranger")
        async with joined(worker):
            await served.wait_status(SERVING)
            stream = await opened(served, request(max_tokens=50))
            for frame in (b"", b"\xff" * 50, b"\x08\x01"):
                await stranger.send_raw(frame)
            await count(served, "worker_frames_malformed", 3)
            await stranger.send(worker_pb2.WorkerMessage(ready=stranger.ready_message()))
            assert (await stranger.receive()).HasField("register_again")
            late = worker_pb2.WorkerMessage(
                epoch=worker.epoch - 1, step_result=worker_pb2.StepResult(step=1)
            )
            await worker.send_raw(late.SerializeToString())
            await count(served, "worker_frames_wrong_epoch")
            assert (await stream.rest()).token_ids == letters("hello", 50)
        await stranger.kill()


async def _loses_for(served: Served, lie: worker_pb2.WorkerMessage) -> None:
    """A worker that sends `lie` is dropped, and its request ends UNAVAILABLE."""
    worker = served.worker()
    async with joined(worker):
        await served.wait_status(SERVING)
        worker.hold()
        stream = await opened(served, request())
        await worker.send(lie)
        error = await stream.error()
        worker.release()
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    await served.wait_status(NOT_SERVING)


async def test_a_worker_that_breaks_the_protocol_is_dropped(
    spec: ModelSpec, text_model: TextModel
) -> None:
    result = worker_pb2.StepResult
    lies = [
        worker_pb2.WorkerMessage(step_result=result(step=7)),
        worker_pb2.WorkerMessage(step_result=result(step=1, handles=[9], token_ids=[1])),
        worker_pb2.WorkerMessage(step_result=result(step=1, handles=[0], token_ids=[10_000])),
        worker_pb2.WorkerMessage(step_result=result(step=1, handles=[0])),
        worker_pb2.WorkerMessage(ready=worker_pb2.Ready(num_device_blocks=1, block_size=1)),
        worker_pb2.WorkerMessage(failed=worker_pb2.Failed(reason="out of memory")),
    ]
    async with serving(spec, text_model) as served:
        for lie in lies:
            await _loses_for(served, lie)


async def test_an_impossible_capacity_drops_the_worker(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with serving(spec, text_model) as served:
        for changes in ({"num_device_blocks": 0}, {"block_size": 0}, {"max_num_seqs": 0}):
            worker = served.worker()
            await worker.register()
            ready = worker.ready_message()
            for name, value in changes.items():
                setattr(ready, name, value)
            await worker.send(worker_pb2.WorkerMessage(ready=ready))
            while served.server.engine.registry.members():
                await served.status()
            await worker.kill()
        assert await served.status() == NOT_SERVING


async def test_a_worker_at_another_step_gets_full_state(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with serving(spec, text_model) as served:
        worker = served.worker()
        async with joined(worker):
            await served.wait_status(SERVING)
            streams = [await opened(served, request(f"q{n}", max_tokens=100)) for n in range(3)]
            await streams[0].read()
            worker.forget()
            answers = [await stream.rest() for stream in streams]
            await served.wait_idle()
            assert served.server.engine.registry.counters["worker_mismatches"] == 1
            assert sum(plan.reset for plan in worker.plans) == 1
    assert [got.token_ids for got in answers] == [letters(f"q{n}", 100) for n in range(3)]


async def test_a_drained_worker_leaves_and_its_streams_move(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with serving(spec, text_model) as served:
        workers = [served.worker(worker_id=f"worker-{index}") for index in range(2)]
        async with joined(*workers):
            while served.server.engine.registry.num_ready < 2:
                await served.status()
            streams = [await opened(served, request(f"d{n}", max_tokens=150)) for n in range(4)]
            served.server.engine.drain_worker("worker-0")
            await workers[0].left.wait()
            answers = [await stream.rest() for stream in streams]
            while len(served.server.engine.registry.members()) > 1:
                await served.status()
            assert await served.status() == SERVING
    assert [got.token_ids for got in answers] == [letters(f"d{n}", 150) for n in range(4)]


async def test_a_worker_drained_while_it_loads_leaves_without_having_served(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with serving(spec, text_model) as served:
        worker = served.worker()
        await worker.register()
        await served.admin.DrainWorker(admin_pb2.DrainWorkerRequest(worker_id="worker-0"))
        await worker.send(worker_pb2.WorkerMessage(ready=worker.ready_message()))
        (member,) = served.server.engine.registry.members()
        while member.state is WorkerState.LOADING:
            await served.status()
        state = await served.admin.GetEngineState(admin_pb2.GetEngineStateRequest())
        assert not state.replicas
        error = await error_of(served.generation.Generate(request()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        while not (await worker.receive()).HasField("drain"):
            pass
        await worker.send(worker_pb2.WorkerMessage(drain_done=worker_pb2.DrainDone()))
        while served.server.engine.registry.members():
            await served.status()
        await worker.kill()


async def test_a_pause_of_the_scheduler_itself_loses_no_worker(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(SERVING)
        stream = await opened(served, request(max_tokens=100))
        time.sleep(1.0)  # the loop, and with it the fake worker, stands still
        assert (await stream.rest()).kinds == ["started", "delta", "finished"]
        assert served.server.engine.registry.counters["workers_lost"] == 0
