"""The worker's loop: register, load, then plans in order until the scheduler says to leave.

    register -> welcome -> load (once in a process) -> ready -> plans ... -> drain -> exit 0
       ^                                                          |
       +---- told to register again, or the scheduler is silent --+   every sequence is forgotten

One thread, no asyncio: a step is one call. Frames of another epoch are dropped, so nothing that an
old scheduler still had on its way can touch the state.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict

import torch

from protos.quire.worker.v1 import worker_pb2
from shared.codec import PROTOCOL_VERSION, decode_plan, encode_result, parse_scheduler_message
from shared.errors import ProtocolError, QuireError
from shared.model_spec import ModelSpec
from shared.plan import StepPlan
from shared.transport import DealerLink
from worker_svc import prefault
from worker_svc.config import WorkerConfig
from worker_svc.engine import Engine, load_engine
from worker_svc.heartbeat import Heartbeat

log = logging.getLogger(__name__)

WELCOME_TIMEOUT_S = 5.0
"""Without a welcome for so long, the worker connects afresh and registers again."""
SILENT_INTERVALS = 6
"""A scheduler that sent nothing for so many heartbeat intervals is gone."""
POLL_S = 0.1
"""How long one wait for a frame takes, so that a stop is seen soon."""


class Refused(QuireError):
    """The scheduler does not take this worker; `str()` is its reason."""


class StepFailed(QuireError):
    """The worker can't go on after a step; the scheduler knows."""


class _Rejoin(Exception):
    """The membership is over; register again. The message says why."""


class _Left(Exception):
    """Drained or stopped: the loop ends well."""


class Worker:
    """One worker process. `run` returns when it is drained or stopped."""

    def __init__(
        self,
        config: WorkerConfig,
        spec: ModelSpec,
        device: torch.device,
        stop: threading.Event | None = None,
    ) -> None:
        """`stop` ends the loop after the step that runs, as SIGTERM does."""
        self._config = config
        self._spec = spec
        self._device = device
        self._stop = stop or threading.Event()
        self._incarnation = secrets.randbits(63) | 1
        self._engine: Engine | None = None
        self._link = self._connect()
        self._heartbeat = Heartbeat(self._send)
        self._epoch = 0
        self._interval_s = 0.0
        self._last_heard_s = 0.0
        self._is_awaiting_reset = False
        self.num_dropped = 0
        """Frames from the scheduler that were malformed or of another epoch."""

    def run(self) -> None:
        """Serve until drained or stopped.

        Raises Refused, ModelLoadError, ConfigError, or StepFailed; the scheduler has been told.
        """
        self._heartbeat.start()
        try:
            while True:
                try:
                    self._register()
                    self._serve(self._ready_engine())
                except _Rejoin as reason:
                    log.warning("%s: registering again", reason)
                    self._heartbeat.leave()
        except _Left:
            self._say(drain_done=worker_pb2.DrainDone())
        finally:
            self._heartbeat.stop()
            self._link.close()

    # -- membership ---------------------------------------------------------------------------

    def _connect(self) -> DealerLink:
        return DealerLink(self._config.scheduler_endpoint, secret=self._config.secret)

    def _register(self) -> None:
        """Say who this is until the scheduler welcomes it; raises Refused."""
        self._epoch = 0
        register = worker_pb2.Register(
            protocol_version=PROTOCOL_VERSION,
            worker_id=self._config.worker_id,
            incarnation=self._incarnation,
            model_fingerprint=self._spec.fingerprint,
            device=self._device.type,
            world_size=1,
        )
        while True:
            self._say(register=register)
            deadline_s = time.monotonic() + WELCOME_TIMEOUT_S
            while (left_s := deadline_s - time.monotonic()) > 0:
                message = self._receive(min(left_s, POLL_S))
                if message is not None and message.HasField("refused"):
                    raise Refused(f"the scheduler refused this worker: {message.refused.reason}")
                if message is not None and message.HasField("welcome"):
                    self._join(message)
                    return
            log.warning("no scheduler answers at %s yet", self._config.scheduler_endpoint)
            # A connection that looks alive may be dead; and what waits in it must not pile up.
            self._reconnect()

    def _join(self, message: worker_pb2.SchedulerMessage) -> None:
        self._epoch = message.epoch
        self._interval_s = message.welcome.heartbeat_interval_ms / 1000
        self._is_awaiting_reset = False
        self._heartbeat.join(self._epoch, self._interval_s)
        log.info("registered as %s, epoch %d", self._config.worker_id, self._epoch)

    def _reconnect(self) -> None:
        old = self._link
        self._link = self._connect()
        old.close()

    def _ready_engine(self) -> Engine:
        """The engine with no sequence in it, loaded at the first membership; says Ready."""
        if self._engine is None:
            try:
                self._engine = load_engine(
                    self._spec, self._config.engine, self._device, self._on_progress
                )
            except _Left:
                raise
            except Exception as error:
                self._say(failed=worker_pb2.Failed(reason=f"it could not load: {error}"))
                raise
            if self._device.type == "cpu":
                prefault.start(self._engine.runner, self._heartbeat.idle_after)
        self._engine.runner.state.reset()
        self._heartbeat.load_fraction = 1.0
        self._say(ready=worker_pb2.Ready(**asdict(self._engine.capacity)))
        self._last_heard_s = time.monotonic()  # while it loaded, nobody listened
        return self._engine

    def _on_progress(self, fraction: float) -> None:
        self._heartbeat.load_fraction = fraction
        if self._stop.is_set():
            raise _Left

    # -- frames -------------------------------------------------------------------------------

    def _serve(self, engine: Engine) -> None:
        """Take frames of this epoch in order, until an exception ends the membership."""
        handlers: dict[str, Callable[[worker_pb2.SchedulerMessage], None]] = {
            "step_plan": lambda message: self._take_plan(engine, message.step_plan),
            "drain": lambda message: self._leave("drained"),
            "register_again": lambda message: self._rejoin("the scheduler asked for it"),
            "welcome": lambda message: self._rejoin("the scheduler opened another epoch"),
            "refused": lambda message: self._refused(message.refused.reason),
            "heartbeat": lambda message: None,
        }
        while True:
            message = self._receive(POLL_S)
            now_s = time.monotonic()
            if message is None:
                if now_s - self._last_heard_s > SILENT_INTERVALS * self._interval_s:
                    self._heartbeat.leave()
                    self._reconnect()
                    self._rejoin("the scheduler is silent")
                continue
            self._last_heard_s = now_s
            handlers[message.WhichOneof("body")](message)

    def _receive(self, timeout_s: float) -> worker_pb2.SchedulerMessage | None:
        """The next message that is meant for this membership, or None. Raises _Left on a stop.

        Welcome, Refused and RegisterAgain are about memberships and pass with any epoch.
        """
        if self._stop.is_set():
            self._leave("stopped")
        frame = self._link.receive(timeout_s)
        if frame is None:
            return None
        try:
            message = parse_scheduler_message(frame)
        except ProtocolError:
            self.num_dropped += 1
            return None
        body = message.WhichOneof("body")
        if body not in ("welcome", "refused", "register_again") and message.epoch != self._epoch:
            self.num_dropped += 1
            return None
        return message

    def _say(self, **body: object) -> None:
        message = worker_pb2.WorkerMessage(epoch=self._epoch, **body)  # type: ignore[arg-type]
        self._send(message.SerializeToString())

    def _send(self, frame: bytes) -> None:
        """By the link of the moment: the heartbeat keeps this method, not a link."""
        self._link.send(frame)

    def _rejoin(self, reason: str) -> None:
        raise _Rejoin(reason)

    def _leave(self, reason: str) -> None:
        log.info("%s: leaving", reason)
        raise _Left

    def _refused(self, reason: str) -> None:
        raise Refused(f"the scheduler refused this worker: {reason}")

    # -- steps --------------------------------------------------------------------------------

    def _take_plan(self, engine: Engine, message: worker_pb2.StepPlan) -> None:
        """Run one plan and send its result, or ask once for full state when it does not fit."""
        try:
            plan = decode_plan(message)
        except ProtocolError as error:
            # The next plan will not fit, and brings the full state.
            log.warning("a malformed plan was dropped: %s", error)
            self.num_dropped += 1
            return
        runner = engine.runner
        if not runner.fits(plan):
            self._ask_full_state(runner.state.step, plan)
            return
        self._is_awaiting_reset = False
        self._heartbeat.step_started = plan.step
        try:
            result = runner.execute(plan)
        except Exception as error:
            log.exception("step %d failed", plan.step)
            self._say(failed=worker_pb2.Failed(reason=f"step {plan.step} failed: {error}"))
            raise StepFailed(f"step {plan.step} failed: {error}") from error
        self._heartbeat.step_finished = plan.step
        self._say(step_result=encode_result(result))

    def _ask_full_state(self, at_step: int, plan: StepPlan) -> None:
        if self._is_awaiting_reset:
            return  # a plan that was sent before the scheduler knew
        self._is_awaiting_reset = True
        log.warning("a plan follows step %d, this worker is at %d", plan.base_step, at_step)
        self._say(
            need_full_state=worker_pb2.NeedFullState(at_step=at_step, got_base_step=plan.base_step)
        )
