"""The registry alone: what a worker says and when, and what the engine is told."""

from __future__ import annotations

from typing import Any

from protos.quire.worker.v1 import worker_pb2
from scheduler_svc.config import WorkerPlaneConfig
from scheduler_svc.membership import Member, WorkerEvent, WorkerLost, WorkerReady, WorkerState
from scheduler_svc.workers import WorkerRegistry
from shared.codec import PROTOCOL_VERSION
from shared.plan import StepPlan

READY = worker_pb2.Ready(
    num_device_blocks=8, block_size=16, max_num_batched_tokens=64, max_num_seqs=4
)


def registry(**config: Any) -> WorkerRegistry:
    return WorkerRegistry(
        WorkerPlaneConfig(**config),
        model_fingerprint="model",
        vocab_size=100,
        first_epoch=1,
        now=0.0,
    )


def say(registry: WorkerRegistry, now: float, **body: Any) -> list[WorkerEvent]:
    """A frame of the newest membership."""
    epoch = max((member.epoch for member in registry.members()), default=0)
    frame = worker_pb2.WorkerMessage(epoch=epoch, **body).SerializeToString()
    return registry.handle_frame(b"id", frame, now)


def register(registry: WorkerRegistry, now: float, incarnation: int = 1) -> list[WorkerEvent]:
    message = worker_pb2.Register(
        protocol_version=PROTOCOL_VERSION,
        worker_id="worker",
        incarnation=incarnation,
        model_fingerprint="model",
    )
    return say(registry, now, register=message)


def only(registry: WorkerRegistry) -> Member:
    (member,) = registry.members()
    return member


def test_a_worker_that_registers_anew_is_given_all_its_time_anew() -> None:
    """Neither the silence nor the hang nor the load of its old membership counts."""
    workers = registry(heartbeat_interval_s=1.0, hang_timeout_s=5.0, load_timeout_s=6.0)
    register(workers, now=0.0)
    (ready,) = say(workers, 0.5, ready=READY)
    assert isinstance(ready, WorkerReady)
    workers.send_plan(ready.replica, StepPlan(step=1, base_step=0), 1.0)
    for beat_s in (1.0, 2.0, 3.0, 4.0, 5.0):
        assert workers.sweep(beat_s) == []
        say(workers, beat_s, heartbeat=worker_pb2.WorkerHeartbeat())
    assert workers.sweep(5.9) == []
    # It comes back just before it would have been lost for its plan.
    assert register(workers, now=5.9, incarnation=2) == [WorkerLost(ready.replica)]
    for now in (6.9, 7.8, 8.8):  # without a word, but for less than three intervals
        assert workers.sweep(now) == []
    say(workers, 8.8, heartbeat=worker_pb2.WorkerHeartbeat())
    (again,) = say(workers, 9.0, ready=READY)
    assert isinstance(again, WorkerReady)
    assert workers.sweep(9.8) == []
    workers.send_plan(again.replica, StepPlan(step=1, base_step=0), 10.0)
    for beat_s in (10.0, 11.0, 12.0, 13.0, 14.0, 15.0):
        say(workers, beat_s, heartbeat=worker_pb2.WorkerHeartbeat())
        assert workers.sweep(beat_s) == []
    assert [member.epoch for member in workers.members()] == [again.replica]
    say(workers, 15.2, heartbeat=worker_pb2.WorkerHeartbeat())
    assert workers.sweep(15.2) == [WorkerLost(again.replica)]


def test_a_worker_that_is_to_leave_before_it_is_ready_is_no_replica() -> None:
    """Its Ready was on the way when Drain was sent: no plan would ever reach it."""
    workers = registry()
    register(workers, now=0.0)
    workers.send_drain(only(workers))
    assert say(workers, 0.1, ready=READY) == []
    assert only(workers).state is WorkerState.DRAINING
    assert workers.num_ready == 0
    assert say(workers, 0.2, drain_done=worker_pb2.DrainDone()) == []
    assert not workers.members()


def test_a_scheduler_that_hardly_gets_on_does_not_take_that_for_silence() -> None:
    """Its workers' frames wait while it stands still: each pause of its own is no silence."""
    workers = registry(heartbeat_interval_s=1.0)
    register(workers, now=0.0)
    say(workers, 0.0, ready=READY)
    for late_s in (0.9, 2.8, 4.7):
        assert workers.sweep(late_s) == []
    say(workers, 4.7, heartbeat=worker_pb2.WorkerHeartbeat())
    for in_time_s in (5.7, 6.7, 7.6):
        assert workers.sweep(in_time_s) == []
    assert [type(event) for event in workers.sweep(8.6)] == [WorkerLost]
