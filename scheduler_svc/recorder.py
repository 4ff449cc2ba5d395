"""Writes down all that goes into the core, so that `scheduler_svc.replay` can drive another core
through it.

One JSON list a line. The first is ["quire-record", version, configuration]. Each other one is an
event before it is handled, as [method, argument, ...], and after a plan ["plan", digest], by which
a replay sees whether it comes to the same. The secret key of block hashes is not in it: plans
don't depend on it. Of constraints it has only what they answered: ["constraints", []] after the
submission of a request that has one, and ["constraints", [answer, ...]] after a result whose tokens
they took, an answer for each in the order of asking: whether another token may follow, or the text
of ConstraintBroken.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.constraint import ConstraintBroken, TokenConstraint
from scheduler_svc.core.messages import Event, NewRequest, ReplicaCapacity, SequenceFinished
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.value_json import to_json
from shared.codec import encode_plan
from shared.errors import ConfigError
from shared.ids import ReplicaId, RequestId
from shared.plan import StepPlan, StepResult, TokenMask

log = logging.getLogger(__name__)

FORMAT, VERSION = "quire-record", 1
MAX_RECORD_BYTES = 1 << 30
"""A record that has grown so large takes nothing more; what it has can still be replayed."""

INPUTS: dict[str, tuple[Any, ...]] = {
    "submit": (NewRequest, float),
    "abort": (RequestId,),
    "finish_sequence": (RequestId, int),
    "cancel": (RequestId,),
    "replica_joined": (ReplicaId, ReplicaCapacity),
    "replica_lost": (ReplicaId,),
    "drain_replica": (ReplicaId,),
    "reset_replica": (ReplicaId, int),
    "schedule": (ReplicaId, float),
    "apply_result": (ReplicaId, StepResult, float),
    "tick": (float,),
    "flush_prefix_cache": (),
}
"""The scheduler's methods that change it, and their arguments."""
CONSTRAINTS = "constraints"
"""The name of the lines that say what constraints answered."""


def plan_digest(plan: StepPlan) -> str:
    """Equal for equal plans alone, but by chance of 2^-64. What a constraint allows doesn't count:
    a replay doesn't know it."""
    data = encode_plan(replace(plan, masked_handles=(), masks=())).SerializeToString(
        deterministic=True
    )
    return hashlib.blake2b(data, digest_size=8).hexdigest()


class Record:
    """A file that is being written; readable by its owner alone, as it holds prompts."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_RECORD_BYTES) -> None:
        """Raises ConfigError when `path` exists or can't be made."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise ConfigError(f"--record: cannot make {path}: {error.strerror}") from error
        self._file = os.fdopen(descriptor, "wb")
        self._path = path
        self._num_bytes_left = max_bytes

    def write(self, *items: object) -> None:
        """One line."""
        if self._file.closed:
            return
        line = json.dumps(to_json(items), separators=(",", ":")).encode() + b"\n"
        self._num_bytes_left -= len(line)
        if self._num_bytes_left < 0:
            log.warning("%s is full: the record ends here", self._path)
            self.close()
            return
        self._file.write(line)

    def flush(self) -> None:
        """Everything so far outlives this process."""
        if not self._file.closed:
            self._file.flush()

    def close(self) -> None:
        self._file.close()


class RecordedConstraint:
    """A constraint that adds each of its answers to a list."""

    def __init__(self, constraint: TokenConstraint, answers: list[bool | str]) -> None:
        self._constraint = constraint
        self._answers = answers

    @property
    def mask(self) -> TokenMask | None:
        return self._constraint.mask

    def accept(self, token_id: int) -> bool:
        try:
            may_go_on = self._constraint.accept(token_id)
        except ConstraintBroken as error:
            self._answers.append(str(error))
            raise
        self._answers.append(may_go_on)
        return may_go_on

    def copy(self) -> RecordedConstraint:
        return RecordedConstraint(self._constraint.copy(), self._answers)


class RecordingScheduler(Scheduler):
    """A scheduler that writes each of INPUTS to `record` before it is handled."""

    def __init__(self, config: SchedulerConfig, hash_key: bytes, record: Record) -> None:
        super().__init__(config, hash_key)
        self._record = record
        self._answers: list[bool | str] = []
        record.write(FORMAT, VERSION, config)

    def submit(self, request: NewRequest, now: float) -> None:
        self._record.write("submit", replace(request, constraint=None), now)
        if request.constraint is not None:
            self._record.write(CONSTRAINTS, [])
            recorded = RecordedConstraint(request.constraint, self._answers)
            request = replace(request, constraint=recorded)
        super().submit(request, now)

    def abort(self, request_id: RequestId) -> None:
        self._record.write("abort", request_id)
        super().abort(request_id)

    def finish_sequence(
        self, request_id: RequestId, sequence_index: int
    ) -> SequenceFinished | None:
        self._record.write("finish_sequence", request_id, sequence_index)
        return super().finish_sequence(request_id, sequence_index)

    def cancel(self, request_id: RequestId) -> list[SequenceFinished]:
        self._record.write("cancel", request_id)
        return super().cancel(request_id)

    def replica_joined(self, replica: ReplicaId, capacity: ReplicaCapacity) -> list[Event]:
        self._record.write("replica_joined", replica, capacity)
        return super().replica_joined(replica, capacity)

    def replica_lost(self, replica: ReplicaId) -> list[Event]:
        self._record.write("replica_lost", replica)
        return super().replica_lost(replica)

    def drain_replica(self, replica: ReplicaId) -> list[Event]:
        self._record.write("drain_replica", replica)
        return super().drain_replica(replica)

    def reset_replica(self, replica: ReplicaId, at_step: int) -> None:
        self._record.write("reset_replica", replica, at_step)
        super().reset_replica(replica, at_step)

    def schedule(self, replica: ReplicaId, now: float) -> tuple[StepPlan | None, list[Event]]:
        self._record.write("schedule", replica, now)
        plan, events = super().schedule(replica, now)
        if plan is not None:
            self._record.write("plan", plan_digest(plan))
        return plan, events

    def apply_result(self, replica: ReplicaId, result: StepResult, now: float) -> list[Event]:
        self._record.write("apply_result", replica, result, now)
        try:
            return super().apply_result(replica, result, now)
        finally:
            if self._answers:
                self._record.write(CONSTRAINTS, self._answers)
                self._answers.clear()

    def tick(self, now: float) -> list[Event]:
        self._record.write("tick", now)
        self._record.flush()
        return super().tick(now)

    def flush_prefix_cache(self) -> int:
        self._record.write("flush_prefix_cache")
        return super().flush_prefix_cache()
