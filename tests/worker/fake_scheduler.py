"""A scheduler at the process border: a real ROUTER socket that speaks by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from protos.quire.worker.v1 import worker_pb2
from shared.codec import encode_plan
from shared.plan import StepPlan

TIMEOUT_S = 60.0
INTERVAL_MS = 200


class FakeScheduler:
    """Sends its heartbeat while it waits; keeps every frame that it was sent."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 200)
        self.socket.bind(endpoint)
        self.identity = b""
        self.epoch = 0
        self.received: list[worker_pb2.WorkerMessage] = []
        self._next_beat_s = 0.0

    def __enter__(self) -> FakeScheduler:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=200)

    def send(self, epoch: int | None = None, **body: Any) -> None:
        epoch = self.epoch if epoch is None else epoch
        self.send_raw(worker_pb2.SchedulerMessage(epoch=epoch, **body).SerializeToString())

    def send_raw(self, frame: bytes) -> None:
        self.socket.send_multipart([self.identity, frame])

    def plan(self, plan: StepPlan, epoch: int | None = None) -> None:
        self.send(epoch, step_plan=encode_plan(plan))

    def welcome(self, epoch: int) -> None:
        self.epoch = epoch
        self.send(
            welcome=worker_pb2.Welcome(heartbeat_interval_ms=INTERVAL_MS, max_frame_bytes=1 << 20)
        )

    def wait_for(
        self,
        body: str,
        *,
        beat: bool = True,
        where: Callable[[Any], bool] = lambda content: True,
    ) -> Any:
        """The next message of this kind; others are kept in `received` and passed over."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            if beat and self.epoch and time.monotonic() >= self._next_beat_s:
                self.send(heartbeat=worker_pb2.SchedulerHeartbeat())
                self._next_beat_s = time.monotonic() + INTERVAL_MS / 1000
            if not self.socket.poll(50):
                continue
            identity, frame = self.socket.recv_multipart()
            message = worker_pb2.WorkerMessage.FromString(frame)
            self.received.append(message)
            if message.HasField(body) and where(getattr(message, body)):
                self.identity = identity
                return getattr(message, body)
        kinds = [message.WhichOneof("body") for message in self.received]
        raise AssertionError(f"no {body} came; only {kinds[-20:]}")

    def admit(self, epoch: int) -> worker_pb2.Ready:
        """Register, Welcome, Ready."""
        self.wait_for("register")
        self.welcome(epoch)
        ready: worker_pb2.Ready = self.wait_for("ready")
        return ready

    def results(self, count: int) -> Sequence[worker_pb2.StepResult]:
        return [self.wait_for("step_result") for _ in range(count)]
