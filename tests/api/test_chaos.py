"""Clients that cancel, run out of time, vanish and dawdle at random: nothing of them stays.

`make chaos` runs 500 of them; the tests alone run fewer. QUIRE_CHAOS is how many, QUIRE_CHAOS_SEED
which ones.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections import Counter
from dataclasses import dataclass, field

import grpc
import pytest

from protos.quire.inference.v1 import inference_pb2, inference_pb2_grpc
from scheduler_svc.core.config import PreemptionMode, SchedulerConfig
from scheduler_svc.text.tokenizer import TextModel
from shared.model_spec import ModelSpec
from tests.api.fake_worker import continuation, joined, letter_after
from tests.api.serving import Answer, Served, answer, request, serving

DETACH = inference_pb2.DISCONNECT_POLICY_DETACH
COUNT = int(os.environ.get("QUIRE_CHAOS", "60"))
SEED = int(os.environ.get("QUIRE_CHAOS_SEED", "0"))
NUM_AT_ONCE = 24
CORE = SchedulerConfig(max_num_seqs=8, preemption_mode=PreemptionMode.SWAP, max_waiting=64)
EXPECTED = frozenset(
    {
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,  # what a client reads when it closes its own connection
    }
)


@dataclass
class Crowd:
    """Clients of one server, and what became of them."""

    served: Served
    rng: random.Random
    outcomes: Counter[str] = field(default_factory=Counter)

    def message(self, number: int) -> inference_pb2.GenerateRequest:
        """A request of one choice, of four, or a beam search, with or without a time to wait."""
        rng = self.rng
        prompt = f"{number}:" + "p" * rng.randrange(150)
        message = request(prompt, max_tokens=rng.choice((1, 5, 40, 90)))
        message.bypass_prefix_cache = rng.random() < 0.1
        message.priority = rng.randrange(-3, 4)
        if rng.random() < 0.3:
            message.queue_timeout_ms = rng.choice((1, 20, 2000))
        kind = rng.random()
        if kind < 0.15:
            message.sampling.n = 4
        elif kind < 0.25:
            message.beam.width = 3
        elif kind < 0.4:
            message.stopping.stop_strings.append(chr(97 + rng.randrange(26)))
        return message

    async def client(self, number: int) -> None:
        """One client; its way is drawn before it begins, so that a seed is one crowd."""
        rng = self.rng
        message = self.message(number)
        way = rng.choice(("stay", "cancel", "deadline", "disconnect", "dawdle", "detach", "detach"))
        patience, rest_s = rng.choice((0, 1, 1, 2, 5)), rng.choice((0.0, 0.02, 0.1))
        timeout_s = rng.choice((0.001, 0.02, 0.1, 0.4)) if way == "deadline" else None
        options = [("grpc.use_local_subchannel_pool", 1)]
        if way == "detach":
            message.request_id, message.disconnect = f"client {number}", DETACH
            message.detach_ttl_s = 1
        returns = rng.random() < 0.5
        responses: list[inference_pb2.GenerateResponse] = []
        async with grpc.aio.insecure_channel(self.served.server.address, options) as channel:
            stub = inference_pb2_grpc.GenerationServiceStub(channel)
            call = stub.Generate(message, timeout=timeout_s)
            try:
                while (response := await call.read()) is not grpc.aio.EOF:
                    responses.append(response)
                    if len(responses) > patience and way in ("cancel", "detach"):
                        call.cancel()
                    elif len(responses) > patience and way == "disconnect":
                        await channel.close()
                    elif way == "dawdle":
                        await asyncio.sleep(rest_s)
            except grpc.aio.AioRpcError as error:
                assert error.code() in EXPECTED, error
                self.outcomes[f"{way} {error.code().name}"] += 1
                return
            except (asyncio.CancelledError, grpc.aio.UsageError):
                if way != "detach" or not returns:
                    self.outcomes[f"{way} left"] += 1
                    return
                after = responses[-1].event_number
                attach = inference_pb2.AttachRequest(
                    request_id=message.request_id, after_event=after
                )
                responses += [response async for response in stub.Attach(attach)]
                assert [r.event_number for r in responses] == list(range(1, len(responses) + 1))
                self.outcomes["detach returned"] += 1
        self.outcomes["ended"] += 1
        check_answer(message, Answer(responses))


def check_answer(message: inference_pb2.GenerateRequest, got: Answer) -> None:
    """A whole answer is the worker's own, whatever happened around it."""
    if message.HasField("beam"):
        return  # its ranking is the core's own; tests/api/test_beams.py looks at it
    for index in range(message.sampling.n or 1):
        choice = Answer([r for r in got.responses if r.sequence_index == index])
        token_ids = continuation(message.text.encode(), message.stopping.max_tokens, letter_after)
        assert choice.token_ids == token_ids[: len(choice.token_ids)]
        if not message.stopping.stop_strings:
            assert choice.token_ids == token_ids


async def baseline(served: Served) -> tuple[int, int]:
    """Tasks and threads once everything has been used."""
    await asyncio.gather(*(answer(served, request(max_tokens=2)) for _ in range(4)))
    return len(asyncio.all_tasks()), num_threads()


def num_threads() -> int:
    """All but those of the text pool, which come as they are needed."""
    names = [thread.name for thread in threading.enumerate()]
    return sum(not name.startswith("quire-text") for name in names)


@pytest.mark.timeout(110)
async def test_a_crowd_leaves_nothing_behind(spec: ModelSpec, text_model: TextModel) -> None:
    """FIELD-FAILURES part 2: decoding goes on, handlers leak, a slow reader blocks others."""
    print(f"seed {SEED}, {COUNT} clients")
    async with serving(spec, text_model, core=CORE) as served:
        worker = served.worker(num_blocks=24, num_host_blocks=16)
        async with joined(worker):
            await served.wait_status(1)
            tasks_before, threads_before = await baseline(served)
            crowd = Crowd(served, random.Random(SEED))
            places = asyncio.Semaphore(NUM_AT_ONCE)

            async def client(number: int) -> None:
                async with places:
                    await crowd.client(number)

            await asyncio.gather(*(client(number) for number in range(COUNT)))
            while (await served.state()).num_detachable:
                await asyncio.sleep(0.05)
            await served.wait_live(0)
            await served.wait_idle()
            served.server.engine.scheduler.check_invariants()
            while len(asyncio.all_tasks()) > tasks_before:
                await served.status()
            assert num_threads() <= threads_before
            counters = served.server.engine.scheduler.counters
            print(dict(crowd.outcomes), counters)
            assert crowd.outcomes["ended"]
