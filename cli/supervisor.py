"""The scheduler and the workers of one machine, as one thing that starts, watches and stops."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cli.errors import EXIT_FAILED, EXIT_USAGE, CommandError
from cli.processes import Backoff, Child, LineSink

WORKER_STOP_S = 10.0
"""How long workers may take to end once the scheduler is gone."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What to start."""

    scheduler_arguments: Sequence[str]
    worker_arguments: Sequence[Sequence[str]]
    """One list for each worker."""
    shutdown_grace_s: float
    """How long open streams may go on once a stop was asked for."""


@dataclass(slots=True)
class _WorkerSeat:
    """A worker's place: the process in it, or the time when the next one starts."""

    name: str
    arguments: Sequence[str]
    child: Child | None = None
    restart_at_s: float = 0.0
    backoff: Backoff = field(default_factory=Backoff)


class Supervisor:
    """Owns the processes. Not for several threads.

    Until `service_began` any death is final: a configuration that never worked won't get better by
    trying. Later a worker that dies is reported and started again after a growing delay, while the
    scheduler moves its streams to the others; the scheduler's own death ends everything.
    """

    def __init__(self, fleet: Fleet, on_line: LineSink, report: Callable[[str], None]) -> None:
        self._fleet = fleet
        self._on_line = on_line
        self._report = report
        self._began = False
        self._scheduler: Child | None = None
        self._seats = [
            _WorkerSeat(f"worker-{index}", arguments)
            for index, arguments in enumerate(fleet.worker_arguments)
        ]

    def start(self) -> None:
        self._scheduler = Child(
            "scheduler", "scheduler_svc", self._fleet.scheduler_arguments, self._on_line
        )
        for seat in self._seats:
            self._start_worker(seat)

    def service_began(self) -> None:
        """From now on a dead worker is started again."""
        self._began = True

    def check(self) -> None:
        """Sees to deaths and restarts; to be called several times a second.

        Raises CommandError when the service can't go on.
        """
        assert self._scheduler is not None
        if (code := self._scheduler.exit_code()) is not None:
            raise _death(self._scheduler, code)
        for seat in self._seats:
            if seat.child is None:
                if time.monotonic() >= seat.restart_at_s:
                    self._start_worker(seat)
            elif (code := seat.child.exit_code()) is not None:
                self._worker_died(seat, seat.child, code)

    def stop(self, at_once: Callable[[], bool]) -> None:
        """Ends everything: the scheduler first, which lets streams complete and sends its workers
        away, then whoever is left. `at_once` is asked all the time; True kills without waiting."""
        if self._scheduler is not None:
            self._scheduler.terminate()
            self._end(self._scheduler, self._fleet.shutdown_grace_s + WORKER_STOP_S, at_once)
        workers = [seat.child for seat in self._seats if seat.child is not None]
        for worker in workers:
            worker.terminate()
        deadline_s = time.monotonic() + WORKER_STOP_S
        for worker in workers:
            self._end(worker, deadline_s - time.monotonic(), at_once)

    def _start_worker(self, seat: _WorkerSeat) -> None:
        seat.child = Child(
            seat.name, "worker_svc", [*seat.arguments, "--exit-with-parent"], self._on_line
        )

    def _worker_died(self, seat: _WorkerSeat, child: Child, code: int) -> None:
        if not self._began:
            raise _death(child, code)
        delay_s = seat.backoff.next_delay_s(time.monotonic() - child.started_s)
        seat.child, seat.restart_at_s = None, time.monotonic() + delay_s
        self._report(f"{_how_it_ended(child, code)}; it starts again in {delay_s:g} s")

    @staticmethod
    def _end(child: Child, patience_s: float, at_once: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + patience_s
        while not child.wait(0.1):
            if at_once() or time.monotonic() > deadline_s:
                child.kill()
                return


def _how_it_ended(child: Child, code: int) -> str:
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"{child.name} {how}"


def _death(child: Child, code: int) -> CommandError:
    """The child's own last words are the cause, where it had any."""
    exit_code = EXIT_USAGE if code == EXIT_USAGE else EXIT_FAILED
    cause = child.last_words()
    return CommandError(f"{_how_it_ended(child, code)}{': ' if cause else ''}{cause}", exit_code)
