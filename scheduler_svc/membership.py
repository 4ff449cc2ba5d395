"""One worker's membership: from its Register until it leaves, dies or is replaced."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from scheduler_svc.core.messages import ReplicaCapacity
from shared.ids import ReplicaId, WorkerId
from shared.plan import StepResult

STEP_TIMES_WINDOW = 1000
"""Steps over which the mean times are taken."""


class WorkerState(Enum):
    """Where a worker stands; the numbers are those of the operator's contract."""

    LOADING = 1
    READY = 2
    DRAINING = 3


class MeanOfLast:
    """Mean of the last `STEP_TIMES_WINDOW` values."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=STEP_TIMES_WINDOW)

    def add(self, value: float) -> None:
        self._values.append(value)

    @property
    def mean(self) -> float:
        return sum(self._values) / len(self._values) if self._values else 0.0


@dataclass(slots=True)
class StepTimes:
    """Where a replica's steps spend their time, in seconds."""

    plan_s: MeanOfLast = field(default_factory=MeanOfLast)
    """Scheduler: making, encoding and sending a plan."""
    apply_s: MeanOfLast = field(default_factory=MeanOfLast)
    """Scheduler: applying a result and feeding the streams."""
    execute_s: MeanOfLast = field(default_factory=MeanOfLast)
    """Worker: the step itself."""
    num_steps: int = 0


class SentPlan(NamedTuple):
    """What is kept of a plan until its answer comes."""

    step: int
    base_step: int


@dataclass(slots=True)
class Member:
    """A registered worker. Times are the shell's monotonic clock."""

    identity: bytes
    """ZeroMQ routing id; frames from and to the worker carry it."""
    worker_id: WorkerId
    incarnation: int
    epoch: int
    device: str
    registered_s: float
    last_heard_s: float
    last_progress_s: float
    superseded: frozenset[int] = frozenset()
    """Incarnations of the same name that this one and its forerunners replaced."""
    state: WorkerState = WorkerState.LOADING
    load_fraction: float = 0.0
    progress: tuple[int, int] = (0, 0)
    """Last step begun and last step ended, as the worker told."""
    in_flight: deque[SentPlan] = field(default_factory=deque)
    """Plans sent and not answered, oldest first."""
    is_gone: bool = False
    """A frame to it could not be sent: its connection is closed, or it does not read."""
    drain_sent: bool = False
    is_replica: bool = False
    """Whether the engine was told that it is ready."""
    times: StepTimes = field(default_factory=StepTimes)

    @property
    def replica(self) -> ReplicaId:
        return ReplicaId(self.epoch)


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A replica can take plans."""

    replica: ReplicaId
    capacity: ReplicaCapacity


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A replica is gone; its epoch is closed."""

    replica: ReplicaId


class StepDone(NamedTuple):
    """A replica answered a plan."""

    member: Member
    result: StepResult


@dataclass(frozen=True, slots=True)
class StateMismatch:
    """A replica did not apply a plan: it is at another step and needs everything whole."""

    replica: ReplicaId
    at_step: int


WorkerEvent = WorkerReady | WorkerLost | StepDone | StateMismatch
