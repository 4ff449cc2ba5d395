"""llama.cpp's server as an engine, asked over its OpenAI-style HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from bench.load import Trace
from bench.peers.completions import complete, is_healthy
from bench.peers.engine import Send, Setup, free_port, process, wait_until_ready


@contextlib.asynccontextmanager
async def start(setup: Setup) -> AsyncIterator[Send]:
    """One slot for each stream, each with room for the longest request; the rest are its own
    defaults (continuous batching, prompt cache, flash attention, batches of 2,048 tokens)."""
    port, scenario = free_port(), setup.scenario
    command: list[str | Path] = [
        setup.peers / "llama" / "bin" / "llama-server",
        "--model",
        setup.model,
    ]
    command += ["--host", "127.0.0.1", "--port", str(port), "--no-ui"]
    command += ["--threads", str(setup.threads), "--threads-batch", str(setup.threads)]
    command += ["--parallel", str(scenario.num_streams)]
    command += ["--ctx-size", str(scenario.num_streams * scenario.longest_tokens)]
    async with process(command, setup.log) as child:
        await wait_until_ready(child, setup.log, lambda: is_healthy(port))

        async def send(prompt: str, max_tokens: int, due_s: float) -> Trace:
            return await complete(port, prompt, max_tokens, due_s)

        yield send
