"""vLLM's CPU build as an engine: the file's weights in bfloat16, asked over OpenAI-style HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from bench.load import Trace
from bench.peers.completions import complete, is_healthy
from bench.peers.engine import (
    EngineFailed,
    Send,
    Setup,
    free_port,
    last_line,
    process,
    wait_until_ready,
)

CONVERT = Path(__file__).with_name("vllm_convert.py")
KV_CACHE_GIB = "2"


@contextlib.asynccontextmanager
async def start(setup: Setup) -> AsyncIterator[Send]:
    """Its own defaults (continuous batching, chunked prefill, prefix cache), with room for the
    longest request and its threads on this machine's cores."""
    venv = setup.peers / "vllm" / "bin"
    folder = setup.peers / "vllm-models" / setup.model.stem
    await _convert(venv / "python", setup, folder)
    port = free_port()
    command: list[str | Path] = [venv / "vllm", "serve", folder, "--dtype", "bfloat16"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", str(setup.scenario.longest_tokens)]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": KV_CACHE_GIB,
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{setup.threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    async with process(command, setup.log, environment=environment) as child:
        await wait_until_ready(child, setup.log, lambda: is_healthy(port))

        async def send(prompt: str, max_tokens: int, due_s: float) -> Trace:
            return await complete(port, prompt, max_tokens, due_s)

        yield send


async def _convert(python: Path, setup: Setup, folder: Path) -> None:
    """Once for each file."""
    if (folder / "config.json").exists():
        return
    async with process([python, CONVERT, setup.model, folder], setup.log) as child:
        if code := await child.wait():
            raise EngineFailed(
                f"the conversion ended with exit code {code}: {last_line(setup.log)}"
            )
