"""The registry of workers: who is a member, in which epoch, and whether it lives and gets on.

Frames come in, events for the engine and frames to workers go out. Whatever a worker sends is
untrusted: a frame that is too large, malformed or of another epoch is dropped and counted, and a
member that breaks the protocol is dropped itself. A closed epoch is never used again, so nothing
that an old membership still sends can reach the core.
"""

from __future__ import annotations

import logging
from collections import Counter, deque

from protos.quire.worker.v1 import worker_pb2
from scheduler_svc.config import WorkerPlaneConfig
from scheduler_svc.membership import (
    Member,
    SentPlan,
    StateMismatch,
    StepDone,
    WorkerEvent,
    WorkerLost,
    WorkerReady,
    WorkerState,
)
from scheduler_svc.worker_checks import capacity_of, refusal_of, require, result_of
from shared.codec import encode_plan, parse_worker_message
from shared.errors import NotFound, ProtocolError
from shared.ids import ReplicaId, WorkerId
from shared.plan import StepPlan

log = logging.getLogger(__name__)

MISSED_HEARTBEATS = 3
MAX_SUPERSEDED = 16


class WorkerRegistry:
    """All members, by routing identity, name and replica."""

    def __init__(
        self,
        config: WorkerPlaneConfig,
        *,
        model_fingerprint: str,
        vocab_size: int,
        first_epoch: int,
        now: float,
    ) -> None:
        """`first_epoch` must lie above every epoch of an earlier run, which may still echo."""
        self._config = config
        self._fingerprint = model_fingerprint
        self._vocab_size = vocab_size
        self._next_epoch = first_epoch
        self._by_identity: dict[bytes, Member] = {}
        self._by_replica: dict[ReplicaId, Member] = {}
        self._last_sweep_s = now
        self._next_heartbeat_s = now
        self.outbox: deque[tuple[bytes, bytes]] = deque()
        """Frames to send, with the identity of the receiver; the engine empties it."""
        self.counters: Counter[str] = Counter()

    # -- views ------------------------------------------------------------------------------

    def members(self) -> list[Member]:
        """Every member, by epoch."""
        return list(self._by_replica.values())

    def member(self, replica: ReplicaId) -> Member | None:
        return self._by_replica.get(replica)

    def named(self, worker_id: str) -> Member:
        """The member of this name; NotFound when there is none."""
        for member in self._by_replica.values():
            if member.worker_id == worker_id:
                return member
        raise NotFound(f"there is no worker named {worker_id!r}")

    @property
    def num_ready(self) -> int:
        return sum(member.state is WorkerState.READY for member in self._by_replica.values())

    # -- what workers send --------------------------------------------------------------------

    def handle_frame(self, identity: bytes, frame: bytes, now: float) -> list[WorkerEvent]:
        """Takes one frame; gives what it means for the engine."""
        if len(frame) > self._config.max_frame_bytes:
            self.counters["worker_frames_too_large"] += 1
            return []
        try:
            message = parse_worker_message(frame)
        except ProtocolError:
            self.counters["worker_frames_malformed"] += 1
            return []
        body = message.WhichOneof("body")
        if body == "register":
            return self._register(identity, message.register, now)
        member = self._by_identity.get(identity)
        if member is None:
            self.counters["worker_frames_unknown_peer"] += 1
            self._reply(
                identity, worker_pb2.SchedulerMessage(register_again=worker_pb2.RegisterAgain())
            )
            return []
        if message.epoch != member.epoch:
            self.counters["worker_frames_wrong_epoch"] += 1
            return []
        member.last_heard_s = now
        try:
            return self._handle_member(member, body, message, now)
        except ProtocolError as error:
            self.counters["workers_dropped_for_protocol"] += 1
            return self.drop(member, f"it broke the protocol: {error}")

    def _handle_member(
        self, member: Member, body: str | None, message: worker_pb2.WorkerMessage, now: float
    ) -> list[WorkerEvent]:
        if body == "step_result":
            return self._step_result(member, message.step_result, now)
        if body == "heartbeat":
            self._heartbeat(member, message.heartbeat, now)
            return []
        if body == "ready":
            return self._ready(member, message.ready, now)
        if body == "need_full_state":
            return self._need_full_state(member, message.need_full_state)
        if body == "drain_done":
            return self.drop(member, "it is drained", level=logging.INFO)
        return self.drop(member, f"it failed: {message.failed.reason[:500]}")

    def _register(
        self, identity: bytes, register: worker_pb2.Register, now: float
    ) -> list[WorkerEvent]:
        former = self._former(register.worker_id)
        refusal = self._refusal(register, former)
        if refusal is not None:
            self.counters["workers_refused"] += 1
            log.warning("worker %r refused: %s", register.worker_id[:64], refusal)
            refused = worker_pb2.Refused(reason=refusal)
            self._reply(identity, worker_pb2.SchedulerMessage(refused=refused))
            return []
        events: list[WorkerEvent] = []
        superseded: frozenset[int] = frozenset()
        for old in (former, self._by_identity.get(identity)):
            if old is not None and old.epoch in self._by_replica:
                events += self.drop(old, "it registered anew")
        if former is not None and former.incarnation != register.incarnation:
            superseded = frozenset([*former.superseded, former.incarnation][-MAX_SUPERSEDED:])
        elif former is not None:
            superseded = former.superseded
        member = Member(
            identity=identity,
            worker_id=WorkerId(register.worker_id),
            incarnation=register.incarnation,
            epoch=self._next_epoch,
            device=register.device[:32],
            registered_s=now,
            last_heard_s=now,
            last_progress_s=now,
            superseded=superseded,
        )
        self._next_epoch += 1
        self._by_identity[identity] = member
        self._by_replica[member.replica] = member
        log.info("worker %s registered, epoch %d", member.worker_id, member.epoch)
        welcome = worker_pb2.Welcome(
            heartbeat_interval_ms=round(self._config.heartbeat_interval_s * 1000),
            max_frame_bytes=self._config.max_frame_bytes,
        )
        self._send(member, worker_pb2.SchedulerMessage(welcome=welcome))
        return events

    def _former(self, worker_id: str) -> Member | None:
        return next((m for m in self._by_replica.values() if m.worker_id == worker_id), None)

    def _refusal(self, register: worker_pb2.Register, former: Member | None) -> str | None:
        if former is not None and register.incarnation in former.superseded:
            return f"another worker named {register.worker_id!r} has started since: rename one"
        if former is None and len(self._by_replica) >= self._config.max_workers:
            return f"the limit of {self._config.max_workers} workers is reached"
        return refusal_of(register, self._fingerprint)

    def _ready(self, member: Member, ready: worker_pb2.Ready, now: float) -> list[WorkerEvent]:
        require(member.state is WorkerState.LOADING, "it says that it is ready a second time")
        capacity = capacity_of(ready)
        member.load_fraction = 1.0
        if member.drain_sent:
            # It hears of it now, and leaves: the engine need never know of it.
            member.state = WorkerState.DRAINING
            return []
        member.state = WorkerState.READY
        member.is_replica = True
        member.last_progress_s = now
        log.info(
            "worker %s is ready: %d blocks of %d tokens on %s",
            member.worker_id,
            capacity.num_device_blocks,
            capacity.block_size,
            member.device,
        )
        return [WorkerReady(member.replica, capacity)]

    def _step_result(
        self, member: Member, message: worker_pb2.StepResult, now: float
    ) -> list[WorkerEvent]:
        result = result_of(message, self._vocab_size)
        if not member.in_flight or member.in_flight[0].step != result.step:
            raise ProtocolError(f"it answers step {result.step}, which is not the next one")
        member.in_flight.popleft()
        member.last_progress_s = now
        member.times.execute_s.add(result.execute_s)
        member.times.num_steps += 1
        return [StepDone(member, result)]

    def _need_full_state(
        self, member: Member, message: worker_pb2.NeedFullState
    ) -> list[WorkerEvent]:
        if all(plan.base_step != message.got_base_step for plan in member.in_flight):
            # Two plans may miss the same state; the first complaint has repaired it.
            self.counters["worker_mismatches_repaired_before"] += 1
            return []
        self.counters["worker_mismatches"] += 1
        member.in_flight.clear()
        return [StateMismatch(member.replica, message.at_step)]

    def _heartbeat(self, member: Member, heartbeat: worker_pb2.WorkerHeartbeat, now: float) -> None:
        progress = (heartbeat.step_started, heartbeat.step_finished)
        if progress != member.progress:
            member.progress = progress
            member.last_progress_s = now
        if member.state is WorkerState.LOADING and 0 <= heartbeat.load_fraction <= 1:
            member.load_fraction = heartbeat.load_fraction

    # -- what workers get ---------------------------------------------------------------------

    def send_plan(self, replica: ReplicaId, plan: StepPlan, now: float) -> None:
        """Sends a plan to a member that is there."""
        member = self._by_replica[replica]
        if not member.in_flight:
            member.last_progress_s = now
        member.in_flight.append(SentPlan(plan.step, plan.base_step))
        self._send(member, worker_pb2.SchedulerMessage(step_plan=encode_plan(plan)))

    def start_draining(self, member: Member) -> None:
        """No further sequences for this worker; `send_drain` follows when it is empty."""
        member.state = WorkerState.DRAINING
        log.info("worker %s drains", member.worker_id)

    def send_drain(self, member: Member) -> None:
        """Asks a worker to leave; it says DrainDone."""
        if not member.drain_sent:
            member.drain_sent = True
            self._send(member, worker_pb2.SchedulerMessage(drain=worker_pb2.Drain()))

    def _send(self, member: Member, message: worker_pb2.SchedulerMessage) -> None:
        message.epoch = member.epoch
        self._reply(member.identity, message)

    def _reply(self, identity: bytes, message: worker_pb2.SchedulerMessage) -> None:
        self.outbox.append((identity, message.SerializeToString()))

    def peer_gone(self, identity: bytes) -> None:
        """A frame of the outbox could not be sent; the next sweep drops the member."""
        self.counters["worker_frames_unroutable"] += 1
        member = self._by_identity.get(identity)
        if member is not None:
            member.is_gone = True

    # -- time ---------------------------------------------------------------------------------

    def sweep(self, now: float) -> list[WorkerEvent]:
        """Sends due heartbeats and drops members that are dead or hang."""
        interval = self._config.heartbeat_interval_s
        stood_still_s = now - self._last_sweep_s - interval
        self._last_sweep_s = now
        if stood_still_s > 0:
            # This process was stopped or got no core: that is no silence of the workers.
            for member in self._by_replica.values():
                member.last_heard_s += stood_still_s
                member.last_progress_s += stood_still_s
        if now >= self._next_heartbeat_s:
            self._next_heartbeat_s = now + interval
            for member in self._by_replica.values():
                heartbeat = worker_pb2.SchedulerHeartbeat()
                self._send(member, worker_pb2.SchedulerMessage(heartbeat=heartbeat))
        events: list[WorkerEvent] = []
        for member in self.members():
            cause = self._cause_of_death(member, now)
            if cause is not None:
                self.counters["workers_lost"] += 1
                events += self.drop(member, cause)
        return events

    def _cause_of_death(self, member: Member, now: float) -> str | None:
        config = self._config
        if member.is_gone:
            return "it can't be reached"
        if now - member.last_heard_s > MISSED_HEARTBEATS * config.heartbeat_interval_s:
            return f"it missed {MISSED_HEARTBEATS} heartbeats"
        if member.in_flight and now - member.last_progress_s > config.hang_timeout_s:
            return f"it made no progress for {config.hang_timeout_s:g} s"
        if (
            member.state is WorkerState.LOADING
            and now - member.registered_s > config.load_timeout_s
        ):
            return f"it was not ready after {config.load_timeout_s:g} s"
        return None

    def next_sweep_s(self) -> float:
        """When `sweep` is due again."""
        silence = MISSED_HEARTBEATS * self._config.heartbeat_interval_s
        due_s = self._next_heartbeat_s
        for member in self._by_replica.values():
            due_s = min(due_s, member.last_heard_s + silence)
        return due_s

    def drop(
        self, member: Member, cause: str, *, level: int = logging.WARNING
    ) -> list[WorkerEvent]:
        """Closes a membership; WorkerLost when the engine knew it as a replica."""
        del self._by_replica[member.replica]
        if self._by_identity.get(member.identity) is member:
            del self._by_identity[member.identity]
        log.log(level, "worker %s left: %s", member.worker_id, cause)
        return [WorkerLost(member.replica)] if member.is_replica else []
