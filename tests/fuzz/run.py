"""One run: a real scheduler process, a sound worker, and everything else wrong."""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from protos.quire.admin.v1 import admin_pb2, admin_pb2_grpc
from protos.quire.inference.v1 import inference_pb2_grpc
from shared.model_spec import ModelSpec
from tests.api.fake_worker import continuation, letter_after
from tests.api.serving import Answer, request
from tests.api.test_process import Process, running, serves
from tests.fuzz.calls import Caller
from tests.fuzz.frames import Frames, SoundWorker

AT_A_TIME = 8
FRAMES_PER_CALL = 0.5
WARM_UP_PART = 0.3
"""Of the calls; caches and pools have their size then."""
GROWTH_LIMIT_MIB = 24.0
MORE_RESOURCES = 8
"""Threads of gRPC's own pools come and go; a leak is one for each call of some kind."""
POOL_THREADS = 5
"""Of texts and constraints; they come when they are needed, and stay."""
SETTLE_LIMIT_S = 10.0
MAX_ANSWERS = 3
DEFECT = re.compile(r"Traceback|CRITICAL")
REF = continuation(b"hello", 8, letter_after)


@dataclass(frozen=True)
class Load:
    """What the scheduler process holds."""

    num_resources: int
    """Threads of every kind and open files."""
    num_tasks: int
    """Of its event loop."""
    num_threads: int
    """That run Python."""

    def is_within(self, warm: Load) -> bool:
        """Whether nothing has stayed since."""
        return (
            self.num_resources <= warm.num_resources + MORE_RESOURCES
            and self.num_tasks <= warm.num_tasks
            and self.num_threads <= warm.num_threads + POOL_THREADS
        )


@dataclass
class Report:
    """What a run found; `failures` must be empty."""

    outcomes: Counter[str]
    failures: list[str]
    growth_mib: float = 0.0
    loads: tuple[Load, ...] = ()
    """When warm, and at the end."""


@dataclass
class Fuzz:
    """A run against one process."""

    scheduler: Process
    spec: ModelSpec
    chance: random.Random
    log: deque[str] = field(default_factory=lambda: deque(maxlen=60))
    defects: list[str] = field(default_factory=list)

    async def run(self, num_calls: int) -> Report:
        """Makes the calls; then everything must be as it was."""
        reading = asyncio.create_task(self._read_log())
        self._worker = self._new_worker()
        await self._worker.join()
        async with (
            grpc.aio.insecure_channel(self.scheduler.address) as api,
            grpc.aio.insecure_channel(self.scheduler.admin_address) as admin_channel,
        ):
            admin = admin_pb2_grpc.AdminServiceStub(admin_channel)
            await serves(api)
            caller = Caller(api, admin_channel, self.chance)
            await self._batch(caller, admin, int(num_calls * WARM_UP_PART))
            await self._rest(admin)
            warm, warm_mib = await self._load_within(None, admin), self._rss_mib()
            await self._batch(caller, admin, num_calls - int(num_calls * WARM_UP_PART))
            report = Report(caller.outcomes, caller.failures)
            report.failures += await self._aftermath(api, admin)
            report.growth_mib = self._rss_mib() - warm_mib
            report.loads = (warm, await self._load_within(warm, admin))
        if report.growth_mib > GROWTH_LIMIT_MIB:
            report.failures.append(f"memory grew by {report.growth_mib:.0f} MiB after the warm-up")
        if not report.loads[-1].is_within(warm):
            report.failures.append(f"{report.loads[-1]} stays, {warm} when warm")
        await self._worker.kill()
        reading.cancel()
        report.failures += [f"in the log: {line}" for line in self.defects]
        return report

    async def _batch(
        self, caller: Caller, admin: admin_pb2_grpc.AdminServiceStub, num_calls: int
    ) -> None:
        frames = Frames(self._worker, self.chance)
        done = 0
        while done < num_calls:
            now = min(AT_A_TIME, num_calls - done)
            async with asyncio.TaskGroup() as group:
                for _ in range(now):
                    group.create_task(caller.call())
                    if self.chance.random() < FRAMES_PER_CALL:
                        group.create_task(frames.send())
            done += now
            await admin.ResumeAdmission(admin_pb2.ResumeAdmissionRequest())
            if await self._is_worker_gone(admin):
                await frames.close()
                frames = Frames(self._worker, self.chance)
        await frames.close()

    async def _serve_again(
        self, api: grpc.aio.Channel, admin: admin_pb2_grpc.AdminServiceStub
    ) -> None:
        """Returns when the server takes requests. A call whose client has left may still pause
        admission or drain the worker after both were put right."""
        async with asyncio.timeout(SETTLE_LIMIT_S):
            serving = asyncio.create_task(serves(api))
            while not serving.done():
                await admin.ResumeAdmission(admin_pb2.ResumeAdmissionRequest())
                await self._is_worker_gone(admin)
                await asyncio.wait((serving,), timeout=0.2)

    async def _is_worker_gone(self, admin: admin_pb2_grpc.AdminServiceStub) -> bool:
        """Whether the sound worker was drained or dropped, and another one is in its place."""
        workers = await admin.ListWorkers(admin_pb2.ListWorkersRequest())
        if self._worker.worker_id in [worker.worker_id for worker in workers.workers]:
            return False
        await self._worker.kill()
        self._worker = self._new_worker()
        await self._worker.join()
        return True

    def _new_worker(self) -> SoundWorker:
        return SoundWorker(
            self.scheduler.worker_endpoint,
            self.spec.fingerprint,
            worker_id="sound",
            incarnation=self.chance.getrandbits(63),
            num_blocks=128,
        )

    async def _aftermath(
        self, api: grpc.aio.Channel, admin: admin_pb2_grpc.AdminServiceStub
    ) -> list[str]:
        """What is not as it must be: idle, whole, and right in its answers."""
        if self.scheduler.process.returncode is not None:
            return ["the scheduler ended:", *self.log]
        await self._serve_again(api, admin)
        state = await self._rest(admin)
        if not _is_idle(state):
            return [f"it does not come to rest: {state}"]
        answer = await self._answer(api, admin)
        wrong = [] if answer.token_ids == REF else [f"{answer.token_ids} is not {REF}"]
        return wrong + self._worker.errors

    async def _answer(
        self, api: grpc.aio.Channel, admin: admin_pb2_grpc.AdminServiceStub
    ) -> Answer:
        """Of a sound request; a late call may take its worker away once more."""
        stub = inference_pb2_grpc.GenerationServiceStub(api)
        for _ in range(MAX_ANSWERS - 1):
            try:
                return Answer([event async for event in stub.Generate(request(), timeout=10)])
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            await self._serve_again(api, admin)
        return Answer([event async for event in stub.Generate(request(), timeout=10)])

    @staticmethod
    async def _rest(
        admin: admin_pb2_grpc.AdminServiceStub,
    ) -> admin_pb2.GetEngineStateResponse:
        """The state once nothing runs, or after SETTLE_LIMIT_S."""
        for _ in range(int(SETTLE_LIMIT_S / 0.1)):
            state = await admin.GetEngineState(admin_pb2.GetEngineStateRequest())
            if _is_idle(state):
                break
            await asyncio.sleep(0.1)
        return state

    async def _read_log(self) -> None:
        assert self.scheduler.process.stderr is not None
        async for line in self.scheduler.process.stderr:
            self.log.append(line.decode(errors="replace").rstrip())
            if DEFECT.search(self.log[-1]):
                self.defects.append(self.log[-1])

    async def _load_within(self, warm: Load | None, admin: admin_pb2_grpc.AdminServiceStub) -> Load:
        """The load when no more tasks end, or once it is within that of a warm server."""
        load: Load | None = None
        for _ in range(int(SETTLE_LIMIT_S / 0.1)):
            state = await admin.GetEngineState(admin_pb2.GetEngineStateRequest())
            before, load = load, Load(self._resources(), state.num_tasks, state.num_threads)
            if load.is_within(warm) if warm else load == before:
                break
            await asyncio.sleep(0.1)
        assert load is not None
        return load

    def _proc(self, name: str) -> Path:
        return Path(f"/proc/{self.scheduler.process.pid}") / name

    def _resources(self) -> int:
        """Threads and open files of the scheduler."""
        return len(os.listdir(self._proc("task"))) + len(os.listdir(self._proc("fd")))

    def _rss_mib(self) -> float:
        pages = int(self._proc("statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _is_idle(state: admin_pb2.GetEngineStateResponse) -> bool:
    return state.num_waiting + state.num_running + state.num_swapped == 0 and all(
        replica.num_steps_in_flight == 0
        and replica.num_free_blocks + replica.num_cached_blocks == replica.num_blocks
        for replica in state.replicas
    )


async def fuzz(model_folder: Path, spec: ModelSpec, seed: int, num_calls: int) -> Report:
    """A run of `num_calls` calls by one seed."""
    async with running(model_folder, "--heartbeat-interval-ms", "200") as scheduler:
        return await Fuzz(scheduler, spec, random.Random(seed)).run(num_calls)
