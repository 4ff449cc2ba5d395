"""The engine: owns the scheduler core and turns the world into events for it, turn by turn.

    fronts --- Submit, Abort, StopSequence --> inbox --> core --> StepPlan --> workers
    workers -- Frame ------------------------>                --> events ----> sinks

A front speaks to the engine by messages and hears from it through its request's sink, so that
fronts can live in processes of their own. All messages that wait are taken before the next plans
are made; each replica has up to two plans in flight. Turns are calls from the event loop, and none
of them waits: the worker that has answered computes nothing until its next plan is there. A turn
that brings results of steps alone does no more than take them and plan: deadlines and states stand
as the turn before left them.

An error of one sink ends that request. An error of the core is a defect and ends the engine:
invariants that broke once would go on to break streams in silence.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.inbox import Abort, Frame, Message, StopSequence, Submit
from scheduler_svc.live_requests import LiveRequests
from scheduler_svc.membership import (
    Member,
    StateMismatch,
    StepDone,
    WorkerEvent,
    WorkerLost,
    WorkerReady,
    WorkerState,
)
from scheduler_svc.workers import WorkerRegistry
from shared.errors import NotFound, ProtocolError, QuireError, Unavailable
from shared.ids import RequestId
from shared.transport import PeerGone, RouterLink

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
MAX_CHECKED_BLOCKS = 1 << 14
"""Larger pools are not checked when idle: it would hold up the loop, and so the next request."""


class Engine:
    """Owns the core; everything runs on one event loop, and nothing here blocks."""

    def __init__(
        self,
        scheduler: Scheduler,
        registry: WorkerRegistry,
        link: RouterLink,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.registry = registry
        self._link = link
        self.counters: Counter[str] = Counter()
        self.serving_changed = asyncio.Event()
        """Set when `is_serving` may have changed; whoever watches clears it."""
        self._clock = clock
        self._inbox: deque[Message] = deque()
        self._end: asyncio.Future[None] | None = None
        """Done by a defect; None while no turns are taken."""
        self._is_due = False
        """Whether something asks for a turn."""
        self._has_changed = False
        """Whether this turn brings more than results of steps."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._is_checked = True
        self._live = LiveRequests(scheduler, self.counters)
        self._is_paused = False
        self._is_closing = False
        self._was_serving = False

    # -- for fronts -----------------------------------------------------------------------------

    def post(self, message: Message) -> None:
        """Leaves a message for the next turn."""
        self._inbox.append(message)
        self._wake()

    # -- for the operator -----------------------------------------------------------------------

    @property
    def is_serving(self) -> bool:
        """Whether a new request would be taken: a worker is ready and admission is open."""
        return self.registry.num_ready > 0 and not self._is_paused and not self._is_closing

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    def pause_admission(self) -> None:
        """Refuses new requests until `resume_admission`; live ones go on."""
        self._is_paused = True
        self._wake()

    def resume_admission(self) -> None:
        self._is_paused = False
        self._wake()

    def close_admission(self) -> None:
        """Refuses new requests for good; live ones go on."""
        self._is_closing = True
        self._wake()

    def cancel(self, request_id: RequestId) -> None:
        """Ends a request on an operator's word; NotFound when it does not live."""
        if request_id not in self._live:
            raise NotFound(f"there is no request named {request_id!r}")
        self.counters["requests_cancelled"] += 1
        self._live.cancel(request_id, self._clock())
        self._wake()

    def drain_worker(self, worker_id: str) -> None:
        """Lets a worker leave when its work is done or moved; NotFound when there is none."""
        self._drain(self.registry.named(worker_id))
        self._wake()

    def flush_prefix_cache(self) -> int:
        """Forgets cached prefixes that nothing holds; gives the number of blocks."""
        return self.scheduler.flush_prefix_cache()

    # -- the loop -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Takes turns until cancelled. Any other end is a defect: it is reported and raised."""
        self._end = asyncio.get_running_loop().create_future()
        try:
            self._link.start(self._take_frame, self._take_turn)
            self._is_due = False
            self._wake()
            await self._end
        finally:
            self._end = None
            if self._timer is not None:
                self._timer.cancel()
            self._live.disown_all(Unavailable("the server stopped", RETRY_AFTER_S))

    def fail_all(self, error: QuireError) -> None:
        """Ends every live request with `error`."""
        self._live.end_all(error)
        self._wake()

    def send_workers_off(self) -> None:
        """Asks every worker to leave at once, when no request is live any more."""
        for member in self.registry.members():
            self._drain(member)
            self.registry.send_drain(member)
        self._wake()

    def _wake(self) -> None:
        """A turn comes before the loop waits again."""
        self._has_changed = True
        if not self._is_due and self._end is not None:
            self._is_due = True
            self._end.get_loop().call_soon(self._take_due_turn)

    def _take_due_turn(self) -> None:
        if self._is_due:  # none was taken meanwhile
            self._take_turn()

    def _take_turn(self) -> None:
        if self._end is None or self._end.done():
            return
        self._is_due = False
        try:
            self._turn()
            self._send()
        except Exception as error:
            self._report_defect()
            self._end.set_exception(error)

    def _set_timer(self) -> None:
        """Another turn comes at the next deadline of registry or core. A timer that is set too
        early stays: it is cheaper to find nothing due than to set one in each turn."""
        due_s = self.registry.next_sweep_s()
        tick_s = self.scheduler.next_tick()
        if tick_s is not None:
            due_s = min(due_s, tick_s)
        if self._timer is None or due_s < self._timer_s:
            if self._timer is not None:
                self._timer.cancel()
            assert self._end is not None
            delay_s = max(0.0, due_s - self._clock())
            self._timer_s = due_s
            self._timer = self._end.get_loop().call_later(delay_s, self._take_timed_turn)

    def _take_timed_turn(self) -> None:
        self._timer = None
        self._has_changed = True
        self._take_turn()

    def _take_frame(self, identity: bytes, frame: bytes) -> None:
        """A turn follows."""
        self._inbox.append(Frame(identity, frame))

    def _send(self) -> None:
        outbox = self.registry.outbox
        while outbox:
            identity, frame = outbox.popleft()
            try:
                self._link.send(identity, frame)
            except (PeerGone, ProtocolError) as error:
                log.warning("a frame could not be sent: %s", error)
                self.registry.peer_gone(identity)
                self._wake()

    def _turn(self) -> None:
        # With what streams post meanwhile: one that found a stop string gets no token more.
        self._take_messages()
        has_changed, self._has_changed = self._has_changed, False
        if has_changed:
            now = self._clock()
            self._take_worker_events(self.registry.sweep(now), now)
            self._live.dispatch(self.scheduler.tick(now), now)
            self._take_messages()
        self._plan(self._clock())
        if has_changed:
            self._finish_drains()
            self._note_serving()
            self._set_timer()
        self._note_idle()

    def _take_messages(self) -> None:
        while self._inbox:
            message = self._inbox.popleft()
            now = self._clock()
            match message:
                case Frame(identity, frame):
                    events = self.registry.handle_frame(identity, frame, now)
                    self._take_worker_events(events, now)
                case Submit():
                    self._submit(message, now)
                case Abort(request_id, sink):
                    self._live.abandon(request_id, sink)
                case StopSequence(request_id, sequence_index, sink):
                    self._live.stop(request_id, sequence_index, sink, now)

    # -- requests -------------------------------------------------------------------------------

    def _submit(self, message: Submit, now: float) -> None:
        request = message.request
        self.counters["requests"] += 1
        try:
            self._check_open()
            self.scheduler.submit(request, now)
        except QuireError as error:
            self.counters["requests_refused"] += 1
            message.sink.fail(error)
            return
        self._live.add(request, message.sink)

    def _check_open(self) -> None:
        if self._is_closing:
            raise Unavailable("the server is shutting down", RETRY_AFTER_S)
        if self._is_paused:
            raise Unavailable("admission is paused by the operator", RETRY_AFTER_S)

    # -- workers --------------------------------------------------------------------------------

    def _take_worker_events(self, events: Iterable[WorkerEvent], now: float) -> None:
        for event in events:
            if isinstance(event, StepDone):
                self._apply(event, now)
                continue
            self._has_changed = True
            match event:
                case WorkerReady(replica, capacity):
                    self._live.dispatch(self.scheduler.replica_joined(replica, capacity), now)
                case WorkerLost(replica):
                    self._live.dispatch(self.scheduler.replica_lost(replica), now)
                case StateMismatch(replica, at_step):
                    log.warning("replica %d is at step %d: full state follows", replica, at_step)
                    self.scheduler.reset_replica(replica, at_step)

    def _apply(self, done: StepDone, now: float) -> None:
        member, result = done
        try:
            events = self.scheduler.apply_result(member.replica, result, now)
        except ProtocolError as error:
            lost = self.registry.drop(member, f"it broke the protocol: {error}")
            self._take_worker_events(lost, now)
            return
        self._live.dispatch(events, now)
        member.times.apply_s.add(self._clock() - now)

    def _plan(self, now: float) -> None:
        for member in self.registry.members():
            if member.state is WorkerState.LOADING or member.drain_sent:
                continue
            while True:
                started_s = self._clock()
                plan, events = self.scheduler.schedule(member.replica, now)
                self._live.dispatch(events, now)
                if plan is None:
                    break
                self.registry.send_plan(member.replica, plan, now)
                self._is_checked = False
                member.times.plan_s.add(self._clock() - started_s)

    def _drain(self, member: Member) -> None:
        if member.state is WorkerState.READY:
            self.registry.start_draining(member)
            self._live.dispatch(self.scheduler.drain_replica(member.replica), self._clock())
        elif member.state is WorkerState.LOADING:
            self.registry.send_drain(member)

    def _finish_drains(self) -> None:
        for member in self.registry.members():
            if member.state is WorkerState.DRAINING and not member.drain_sent:
                if not member.in_flight and self.scheduler.is_drained(member.replica):
                    self.registry.send_drain(member)
                else:
                    self._has_changed = True  # the next turn looks again

    # -- state ----------------------------------------------------------------------------------

    def _note_serving(self) -> None:
        if self.is_serving != self._was_serving:
            self._was_serving = self.is_serving
            self.serving_changed.set()

    def _note_idle(self) -> None:
        """Checks the core's invariants once whenever all work is done."""
        if self._is_checked or self._live:
            return
        if all(not member.in_flight for member in self.registry.members()):
            pools = self.scheduler.replicas()
            if sum(pool.num_blocks + pool.num_host_blocks for pool in pools) <= MAX_CHECKED_BLOCKS:
                self.scheduler.check_invariants()
            self._is_checked = True

    def _report_defect(self) -> None:
        log.critical(
            "the engine stops on a defect: %d live requests, counters %s, members %s",
            len(self._live),
            dict(self.counters + self.registry.counters),
            self.registry.members(),
            exc_info=True,
        )
