"""OpenVINO GenAI as an engine: in-process continuous batching, without any server in front."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.load import Trace
from bench.peers.engine import (
    START_TIMEOUT_S,
    EngineFailed,
    Send,
    Setup,
    last_line,
    process,
)

CACHE_BYTES_PER_TOKEN = 32 << 10
"""KV cache of a token: room for models of the size that this benchmark is made for."""


@dataclass(slots=True)
class _Open:
    """A request under way."""

    trace: Trace
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Link:
    """Requests to the child, and its events into their traces."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdin is not None and child.stdout is not None
        self._to_child, self._from_child = child.stdin, child.stdout
        self._ids = itertools.count()
        self._open: dict[int, _Open] = {}

    async def is_ready(self) -> bool:
        """Waits for the child's first line. False when it ended instead."""
        return bool(await self._from_child.readline())

    async def send(self, prompt: str, max_tokens: int, due_s: float) -> Trace:
        request_id, request = next(self._ids), _Open(Trace(due_s))
        self._open[request_id] = request
        line = json.dumps({"id": request_id, "prompt": prompt, "max_tokens": max_tokens})
        self._to_child.write(line.encode() + b"\n")
        await request.ended.wait()
        return request.trace

    async def pump(self) -> None:
        """Reads events until the child ends; what is still open then has failed."""
        async for line in self._from_child:
            self._note(json.loads(line))
        for request in self._open.values():
            request.trace.error = "the engine's process ended"
            request.trace.end_s = time.perf_counter()
            request.ended.set()

    def _note(self, event: dict[str, Any]) -> None:
        for key, count in event["tokens"].items():
            trace = self._open[int(key)].trace
            trace.message_s.append(event["at_s"])
            trace.message_tokens.append(count)
            trace.num_output_tokens += count
        for key, num_prompt_tokens in event["ended"].items():
            request = self._open.pop(int(key))
            request.trace.num_prompt_tokens = num_prompt_tokens
            request.trace.end_s = event["at_s"]
            request.ended.set()


@contextlib.asynccontextmanager
async def start(setup: Setup) -> AsyncIterator[Send]:
    """Prefix caching and split-fuse scheduling are on; its own defaults otherwise."""
    cache_bytes = 2 * setup.scenario.total_tokens * CACHE_BYTES_PER_TOKEN
    python = setup.peers / "openvino" / "bin" / "python"
    command: list[str | Path] = [python, "-m", "bench.peers.openvino_child"]
    command += [setup.model, str(setup.threads), str(setup.scenario.num_streams)]
    command += [str(math.ceil(cache_bytes / 2**30))]
    async with process(command, setup.log, piped=True) as child:
        link = Link(child)
        try:
            ready = await asyncio.wait_for(link.is_ready(), START_TIMEOUT_S)
        except TimeoutError:
            ready = False
        if not ready:
            raise EngineFailed(f"would not start: {last_line(setup.log)}")
        pump = asyncio.create_task(link.pump())
        try:
            yield link.send
        finally:
            pump.cancel()
