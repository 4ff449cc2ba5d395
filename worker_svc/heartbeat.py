"""The thread that tells the scheduler that this worker lives, and how far it has got.

It has a thread of its own so that a long load or step does not look like death; that a step takes
too long is seen by the steps it reports.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from protos.quire.worker.v1 import worker_pb2


class Heartbeat:
    """Beats while there is a membership. The main thread sets the progress, any time."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        """`send` takes a frame from any thread."""
        self._send = send
        self._lock = threading.Lock()
        """Held while a beat is sent, so that none of an old epoch comes after `leave`."""
        self._wake = threading.Event()
        self._epoch: int | None = None
        self._interval_s: float | None = None
        self._is_stopped = False
        self.load_fraction = 0.0
        self.step_started = 0
        self.step_finished = 0
        self._thread = threading.Thread(target=self._run, name="quire-heartbeat", daemon=True)

    def idle_after(self) -> int | None:
        """The last step; None while one runs."""
        finished = self.step_finished
        return finished if self.step_started == finished else None

    def start(self) -> None:
        self._thread.start()

    def join(self, epoch: int, interval_s: float) -> None:
        """Beat for `epoch`, at once and then every `interval_s` seconds."""
        with self._lock:
            self._epoch, self._interval_s = epoch, interval_s
            self.step_started = self.step_finished = 0
        self._wake.set()

    def leave(self) -> None:
        """Beat no more until `join`."""
        with self._lock:
            self._epoch = None

    def stop(self) -> None:
        """End the thread."""
        self._is_stopped = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_stopped:
            self._beat()
            self._wake.wait(self._interval_s)
            self._wake.clear()

    def _beat(self) -> None:
        with self._lock:
            if self._epoch is None:
                return
            beat = worker_pb2.WorkerHeartbeat(
                step_started=self.step_started,
                step_finished=self.step_finished,
                load_fraction=self.load_fraction,
            )
            message = worker_pb2.WorkerMessage(epoch=self._epoch, heartbeat=beat)
            self._send(message.SerializeToString())
