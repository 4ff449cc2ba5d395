"""The load generator: sends a workload over gRPC and notes when each token came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import grpc

from bench.workload import Job
from protos.quire.inference.v1 import inference_pb2, inference_pb2_grpc


@dataclass(slots=True)
class Trace:
    """What happened to one request; seconds on one monotonic clock."""

    due_s: float
    """When it should have been sent. In an open loop the wait counts from here, so that a late
    generator hides nothing."""
    message_s: list[float] = field(default_factory=list)
    """When each message with tokens came."""
    message_tokens: list[int] = field(default_factory=list)
    """How many tokens each of them had."""
    end_s: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None
    """Status and sentence, when it failed."""

    @property
    def first_token_s(self) -> float:
        return self.message_s[0] - self.due_s

    def inter_token_s(self) -> Iterator[float]:
        """Seconds between successive tokens. Tokens that came in one message share its wait."""
        for before_s, now_s, tokens in zip(
            self.message_s, self.message_s[1:], self.message_tokens[1:], strict=False
        ):
            yield from [(now_s - before_s) / tokens] * tokens


@dataclass(frozen=True, slots=True)
class Sender:
    """Sends one request at a time; shared by all clients of a run (one HTTP/2 connection each
    would measure connections, not the server)."""

    channel: grpc.aio.Channel
    model: str = ""
    metadata: Sequence[tuple[str, str]] = ()

    async def send(self, job: Job, due_s: float) -> Trace:
        """Streams one greedy answer of exactly `job.max_tokens`; a failed call is told in the
        trace."""
        trace = Trace(due_s)
        request = inference_pb2.GenerateRequest(
            model=self.model,
            text=job.prompt,
            sampling=inference_pb2.SamplingParams(temperature=0.0),
            stopping=inference_pb2.StoppingParams(max_tokens=job.max_tokens, ignore_eos=True),
        )
        stub = inference_pb2_grpc.GenerationServiceStub(self.channel)
        try:
            async for response in stub.Generate(request, metadata=tuple(self.metadata)):
                self._note(trace, response)
        except grpc.aio.AioRpcError as error:
            trace.error = f"{error.code().name}: {error.details()}"
        trace.end_s = time.perf_counter()
        return trace

    @staticmethod
    def _note(trace: Trace, response: inference_pb2.GenerateResponse) -> None:
        event = response.WhichOneof("event")
        if event == "started":
            trace.num_prompt_tokens = response.started.num_prompt_tokens
            trace.num_cached_tokens = response.started.num_cached_tokens
        elif event == "delta" and response.delta.token_ids:
            trace.message_s.append(time.perf_counter())
            trace.message_tokens.append(len(response.delta.token_ids))
        elif event == "finished":
            trace.num_output_tokens = response.finished.usage.num_output_tokens


Progress = Callable[[], None]
"""Called once for each request that ended."""


async def run_closed(
    sender: Sender, jobs: Sequence[Job], num_clients: int, on_end: Progress
) -> list[Trace]:
    """Closed loop: each of `num_clients` sends its next request when its last one has ended."""
    waiting = iter(jobs)
    traces: list[Trace] = []

    async def client() -> None:
        for job in waiting:  # one shared iterator: each job goes to one client
            traces.append(await sender.send(job, time.perf_counter()))
            on_end()

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return traces


async def run_open(
    sender: Sender, jobs: Sequence[Job], arrivals_s: Sequence[float], on_end: Progress
) -> list[Trace]:
    """Open loop: each request is sent at its arrival time, however many still run."""
    start_s = time.perf_counter()

    async def arrive(job: Job, at_s: float) -> Trace:
        await asyncio.sleep(start_s + at_s - time.perf_counter())
        trace = await sender.send(job, start_s + at_s)
        on_end()
        return trace

    return await asyncio.gather(
        *(arrive(job, at_s) for job, at_s in zip(jobs, arrivals_s, strict=True))
    )
