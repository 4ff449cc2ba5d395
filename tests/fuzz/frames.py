"""Whatever may come over the worker plane: garbage, lies, the past, and workers that misbehave."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import dataclass, field

from protos.quire.worker.v1 import worker_pb2
from shared.codec import encode_result
from shared.plan import StepPlan, StepResult
from tests.api.fake_worker import FakeWorker
from tests.fuzz.messages import mutated, perturb

HUGE_BYTES = 3 << 20
MAX_KEPT_FRAMES = 200


@dataclass
class SoundWorker(FakeWorker):
    """Works as it should; what it sends is kept, for others to send it again."""

    sent: deque[bytes] = field(default_factory=lambda: deque(maxlen=MAX_KEPT_FRAMES))

    async def send_raw(self, frame: bytes) -> None:
        self.sent.append(frame)
        await super().send_raw(frame)

    def _execute(self, plan: StepPlan) -> StepResult:
        self.plans.clear()  # a long run is to stay small
        return super()._execute(plan)


@dataclass
class LyingWorker(FakeWorker):
    """Joins, and answers its plans with something else."""

    chance: random.Random = field(default_factory=random.Random)

    def _execute(self, plan: StepPlan) -> StepResult:
        result = super()._execute(plan)
        handles, token_ids = list(result.handles), list(result.token_ids)
        match self.chance.randrange(5):
            case 0:
                token_ids = [2**32 - 1 for _ in token_ids]
            case 1:
                handles = handles[::-1]
            case 2:
                handles, token_ids = handles[1:], token_ids[1:]
            case 3:
                return StepResult(plan.step + 1, handles, token_ids)
            case _:
                handles.append(2**31)
                token_ids.append(1)
        return StepResult(plan.step, handles, token_ids, result.failures)


class Frames:
    """Sends random frames, from a connection that is no member and from the sound worker's."""

    def __init__(self, worker: SoundWorker, chance: random.Random) -> None:
        self._worker = worker
        self._chance = chance
        self._stranger = FakeWorker(worker.endpoint, worker.fingerprint)
        self._num_liars = 0

    async def send(self) -> None:
        """One frame, or one worker that lies."""
        match self._chance.randrange(12):
            case 0:
                await self._lie()
            case 1:
                await self._stranger.send_raw(bytes(HUGE_BYTES))
            case 2 | 3:
                await self._stranger.send_raw(self._chance.randbytes(self._chance.randrange(200)))
            case 4 | 5 if self._worker.sent:
                await self._stranger.send_raw(self._chance.choice(self._worker.sent))
            case 6 | 7 if self._worker.sent:
                old = self._chance.choice(self._worker.sent)
                await self._stranger.send_raw(mutated(old, self._chance))
            case 8:
                await FakeWorker.send_raw(self._worker, self._chance.randbytes(50))
            case 9:
                await FakeWorker.send_raw(self._worker, self._of_a_past_epoch())
            case _:
                message = worker_pb2.WorkerMessage()
                perturb(message, self._chance, 0.3)
                await self._stranger.send_raw(message.SerializeToString())

    async def close(self) -> None:
        await self._stranger.kill()

    def _of_a_past_epoch(self) -> bytes:
        result = encode_result(StepResult(self._chance.randrange(100), (), ()))
        epoch = self._worker.epoch - self._chance.randrange(1, 4)
        return worker_pb2.WorkerMessage(epoch=epoch, step_result=result).SerializeToString()

    async def _lie(self) -> None:
        """A worker that joins, is found out when it answers, and goes without a word."""
        self._num_liars += 1
        liar = LyingWorker(
            self._worker.endpoint,
            self._worker.fingerprint,
            worker_id=f"liar-{self._num_liars}",
            chance=self._chance,
        )
        await liar.join()
        await asyncio.sleep(0.05)
        await liar.kill()
