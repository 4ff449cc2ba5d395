"""A request whose client leaves, in each state and each way, holds nothing two steps later."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from protos.quire.inference.v1 import inference_pb2, inference_pb2_grpc
from scheduler_svc.core.config import PreemptionMode, SchedulerConfig
from scheduler_svc.text.tokenizer import TextModel
from shared.model_spec import ModelSpec
from shared.plan import CacheOpKind, StepPlan
from tests.api.fake_worker import FakeWorker, continuation, joined, letter_after
from tests.api.serving import OpenStream, Served, opened, request, serving

OTHER = b"another client's prompt of forty letters"
LIMITS_S = (0.3, 1.5, 6.0)
"""Deadlines to try: the first one that does not pass before the state is reached."""


@dataclass
class Leaver:
    """A client with a connection of its own."""

    channel: grpc.aio.Channel
    call: Any

    @classmethod
    def ask(
        cls, served: Served, message: inference_pb2.GenerateRequest, timeout_s: float | None
    ) -> Leaver:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.aio.insecure_channel(served.server.address, options)
        stub = inference_pb2_grpc.GenerationServiceStub(channel)
        return cls(channel, stub.Generate(message, timeout=timeout_s))

    async def read(self, num_tokens: int) -> None:
        """Returns when so many tokens of all sequences have come; 0 waits for Started."""
        got = -1
        while got < num_tokens:
            response = await self.call.read()
            assert response is not grpc.aio.EOF
            got += len(response.delta.token_ids) + response.HasField("started")


async def leave_by_cancel(leaver: Leaver) -> None:
    leaver.call.cancel()


async def leave_by_disconnect(leaver: Leaver) -> None:
    await leaver.channel.close()


async def leave_by_deadline(leaver: Leaver) -> None:
    assert await leaver.call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


Reach = Callable[[Served, FakeWorker, float | None], Awaitable[tuple[Leaver, OpenStream | None]]]
"""Brings a client's request into a state and holds the worker; gives another's stream, if any."""


async def waiting(
    served: Served, worker: FakeWorker, timeout_s: float | None
) -> tuple[Leaver, OpenStream | None]:
    other = await opened(served, request(OTHER[:5].decode(), max_tokens=200))
    worker.hold()
    leaver = Leaver.ask(served, request(), timeout_s)
    await served.wait_live(2)
    return leaver, other


async def mid_prefill(
    served: Served, worker: FakeWorker, timeout_s: float | None
) -> tuple[Leaver, OpenStream | None]:
    worker.hold()
    leaver = Leaver.ask(served, request("x" * 200), timeout_s)
    await leaver.read(0)
    (live,) = served.server.engine.scheduler.live_requests()
    assert live.sequences[0].num_output_tokens == 0
    return leaver, None


def running(**fields: Any) -> Reach:
    async def reach(
        served: Served, worker: FakeWorker, timeout_s: float | None
    ) -> tuple[Leaver, OpenStream | None]:
        worker.hold_after = lambda plan: bool(plan.decode_handles) and plan.step > 12
        leaver = Leaver.ask(served, request(max_tokens=200, **fields), timeout_s)
        await leaver.read(0 if "beam" in fields else 3)
        while not worker.plans or worker.plans[-1].step <= 12:
            await served.status()
        return leaver, None

    return reach


async def swapped(
    served: Served, worker: FakeWorker, timeout_s: float | None
) -> tuple[Leaver, OpenStream | None]:
    def swaps_out(plan: StepPlan) -> bool:
        return any(op.kind is CacheOpKind.SWAP_OUT for op in plan.cache_ops)

    worker.hold_after = swaps_out
    worker.hold()
    other = await opened(served, request(OTHER.decode(), max_tokens=60))
    leaver = Leaver.ask(served, request("l" * 40, max_tokens=60), timeout_s)
    await served.wait_live(2)
    worker.release()
    while (await served.state()).num_swapped == 0:
        await served.status()
    return leaver, other


STATES: dict[str, tuple[Reach, SchedulerConfig, int]] = {
    "waiting": (waiting, SchedulerConfig(max_num_seqs=1), 64),
    "mid-prefill": (mid_prefill, SchedulerConfig(max_num_batched_tokens=16), 64),
    "running": (running(), SchedulerConfig(), 64),
    "n=4": (running(sampling=inference_pb2.SamplingParams(n=4)), SchedulerConfig(), 64),
    "beams": (running(beam=inference_pb2.BeamParams(width=4)), SchedulerConfig(), 64),
    "swapped": (swapped, SchedulerConfig(preemption_mode=PreemptionMode.SWAP), 10),
}
WAYS = {
    "cancel": leave_by_cancel,
    "disconnect": leave_by_disconnect,
    "deadline": leave_by_deadline,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("state", STATES)
async def test_who_leaves_holds_nothing_two_steps_later(
    spec: ModelSpec, text_model: TextModel, state: str, way: str
) -> None:
    """FIELD-FAILURES part 2: cancel while waiting, in mid-prefill, while swapped, with n=4."""
    reach, core, num_blocks = STATES[state]
    for timeout_s in LIMITS_S if way == "deadline" else (None,):
        async with serving(spec, text_model, core=core) as served:
            worker = served.worker(num_blocks=num_blocks, num_host_blocks=8)
            async with joined(worker):
                await served.wait_status(1)
                with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError):
                    async with asyncio.timeout(timeout_s and 0.8 * timeout_s):
                        leaver, other = await reach(served, worker, timeout_s)
                    await left(served, worker, WAYS[way](leaver), other)
                    await leaver.channel.close()
                    return
    raise AssertionError(f"{state} was not reached within {LIMITS_S[-1]} s")


async def left(
    served: Served, worker: FakeWorker, leave: Awaitable[None], other: OpenStream | None
) -> None:
    """Lets the client leave, and checks what remains."""
    await leave
    await served.wait_live(0 if other is None else 1)
    num_plans = len(worker.plans)
    worker.hold_after = lambda _: False
    worker.release()
    if other is not None:
        got = await other.rest()
        prompt = OTHER[: got.started.num_prompt_tokens]
        assert got.token_ids == continuation(prompt, got.started.max_tokens, letter_after)
    await served.wait_idle()
    served.server.engine.scheduler.check_invariants()
    if other is None:
        # Two plans were in flight at most; after these none computes anything.
        assert all(plan.num_tokens == 0 for plan in worker.plans[num_plans + 2 :])
