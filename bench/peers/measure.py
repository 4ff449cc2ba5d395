"""One measurement: a scenario driven against one running engine, and its figures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bench.load import Trace
from bench.peers.engine import EngineFailed, Send, Setup, Start
from bench.peers.scenarios import Scenario
from bench.report import Spread
from bench.workload import Job, Workload

LONG_AFTER_S = 2.0
"""When the first long prompt comes: the streams decode by then."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What one measurement came to."""

    tok_s: float
    """Output tokens of all requests a second, from the first request to the end of the last."""
    ttft_ms: float
    """Median time to the first token; of the long prompts, where there are such."""
    ttft_p99_ms: float
    itl_p50_ms: float
    """Between tokens; with long prompts, only while one of them waits for its first token."""
    itl_p99_ms: float
    num_prompt_tokens: int


async def measure(start: Start, setup: Setup) -> Figures:
    """Starts the engine, warms it up, drives the scenario and ends the engine.

    Raises EngineFailed, also when a request failed or had not exactly the asked-for tokens: an
    engine that does less work must not look fast.
    """
    scenario = setup.scenario
    async with start(setup) as send:
        await drive(send, scenario.warm_up(), long_after_s=0.0)
        begin_s = time.perf_counter()
        streams, long = await drive(send, scenario, LONG_AFTER_S)
        wall_s = time.perf_counter() - begin_s
    return figures(streams, long, wall_s)


def figures(streams: Sequence[Trace], long: Sequence[Trace], wall_s: float) -> Figures:
    """`long` is empty where the scenario has no long prompts."""
    gaps_s = gaps_during(streams, long) if long else _gaps(streams)
    ttft = Spread.of_seconds(trace.first_token_s for trace in long or streams)
    itl = Spread.of_seconds(gaps_s)
    if ttft is None or itl is None:
        raise EngineFailed("no stream ran while the long prompts came" if long else "no tokens")
    return Figures(
        tok_s=sum(trace.num_output_tokens for trace in (*streams, *long)) / wall_s,
        ttft_ms=ttft.p50,
        ttft_p99_ms=ttft.p99,
        itl_p50_ms=itl.p50,
        itl_p99_ms=itl.p99,
        num_prompt_tokens=sum(trace.num_prompt_tokens for trace in (*streams, *long)),
    )


def _gaps(traces: Iterable[Trace]) -> Iterator[float]:
    for trace in traces:
        yield from trace.inter_token_s()


def gaps_during(streams: Iterable[Trace], long: Sequence[Trace]) -> Iterator[float]:
    """Seconds between tokens of `streams` that overlap the wait of a long prompt:

        long        sent |----------------------| first token
        stream    t   t     t        t        t     t   t
                    no  yes    yes       yes   yes   no

    Over all tokens a stall of seconds would hide: with 99 quick tokens to each it is no p99.
    """
    waits_s = [(trace.due_s, trace.message_s[0]) for trace in long]
    for trace in streams:
        for before_s, now_s, tokens in zip(
            trace.message_s, trace.message_s[1:], trace.message_tokens[1:], strict=False
        ):
            if any(before_s < end_s and now_s > begin_s for begin_s, end_s in waits_s):
                yield from [(now_s - before_s) / tokens] * tokens


async def drive(
    send: Send, scenario: Scenario, long_after_s: float
) -> tuple[list[Trace], list[Trace]]:
    """Sends the scenario's load; traces of the clients' requests, and of the long prompts. Raises
    EngineFailed, also for a request that gave less or more than it was asked for."""

    async def long() -> list[Trace]:
        if scenario.long is None:
            return []
        await asyncio.sleep(long_after_s)
        return await _closed(send, scenario.long, num_clients=1)

    streams, others = await asyncio.gather(
        _closed(send, scenario.load, scenario.num_clients), long()
    )
    return streams, others


async def _closed(send: Send, workload: Workload, num_clients: int) -> list[Trace]:
    """Each client sends its next request when its last one has ended. Raises EngineFailed unless
    every request gave exactly what it was asked for."""
    waiting = iter(workload.jobs())
    ended: list[tuple[Job, Trace]] = []

    async def client() -> None:
        for job in waiting:  # one shared iterator: each job goes to one client
            ended.append((job, await send(job.prompt, job.max_tokens, time.perf_counter())))

    await asyncio.gather(*(client() for _ in range(num_clients)))
    for job, trace in ended:
        _check(trace, job)
    return [trace for _, trace in ended]


def _check(trace: Trace, job: Job) -> None:
    if trace.error is not None:
        raise EngineFailed(f"a request failed: {trace.error}")
    if not trace.num_output_tokens == sum(trace.message_tokens) == job.max_tokens:
        raise EngineFailed(
            f"a request gave {trace.num_output_tokens} tokens in {sum(trace.message_tokens)} "
            f"counted ones instead of {job.max_tokens}"
        )
