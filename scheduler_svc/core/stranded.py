"""Waiting requests that no replica can take, and how long they may stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.endings import Endings
from scheduler_svc.core.messages import Event, FailureKind
from scheduler_svc.core.placement import may_take, usable
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Request
from scheduler_svc.core.waiting_queue import WaitingQueue
from shared.ids import ReplicaId


class Stranded:
    """Fails what no replica that is left can hold, at once; and what waits for any replica at all,
    when none has come within the grace."""

    def __init__(
        self,
        replicas: Mapping[ReplicaId, Replica],
        waiting: WaitingQueue,
        endings: Endings,
        config: SchedulerConfig,
    ) -> None:
        """`replicas` and `waiting` are the scheduler's own."""
        self._replicas = replicas
        self._waiting = waiting
        self._endings = endings
        self._grace_s = config.no_replica_grace_s
        self._without_replica_since: float | None = None

    def replicas_changed(self, now: float) -> list[Event]:
        """A replica came, drains or is gone: what waits may have none left that can take it."""
        if usable(self._replicas.values()):
            self._without_replica_since = None
            return self._fail_all()
        if self._without_replica_since is None:
            self._without_replica_since = now
        return [] if self._grace_s > 0 else self._fail_all()

    def tick(self, now: float) -> list[Event]:
        """Fails what waits when the grace is over."""
        grace_end_s = self.grace_end()
        return self._fail_all() if grace_end_s is not None and grace_end_s <= now else []

    def grace_end(self) -> float | None:
        """When `tick` has something to do; None while that is nothing."""
        since = self._without_replica_since
        if since is None or next(self._requests(), None) is None:
            return None
        return since + self._grace_s

    def _requests(self) -> Iterator[Request]:
        replicas = self._replicas.values()
        for seq in self._waiting:
            if not any(may_take(replica, seq, replicas) for replica in replicas):
                yield seq.request

    def _fail_all(self) -> list[Event]:
        if usable(self._replicas.values()):
            kind, message = FailureKind.TOO_LARGE, "no worker that is left can hold it"
        else:
            kind, message = FailureKind.NO_REPLICA, "no worker is left"
        requests = {request.id: request for request in self._requests()}
        return [self._endings.fail(request, kind, message) for request in requests.values()]
