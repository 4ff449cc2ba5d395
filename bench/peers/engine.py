"""What an engine under measurement is: a way to start it, to send it requests, and to end it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from bench.load import Trace
from bench.peers.scenarios import Scenario

Send = Callable[[str, int, float], Awaitable[Trace]]
"""(prompt, max_tokens, due_s) streams one greedy answer of exactly max_tokens. Never raises for a
refused or broken request; that stands in the trace."""

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.1


class EngineFailed(Exception):
    """An engine that is not set up, would not start or broke off; the sentence says why."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How an engine shall run."""

    model: Path
    """The GGUF file that all engines read."""
    peers: Path
    """Where bench/peers/setup.sh put the peers."""
    threads: int
    """CPU threads for computing."""
    scenario: Scenario
    """Sizes batches and caches."""
    log: Path
    """Takes what the engine prints."""


Start = Callable[[Setup], AbstractAsyncContextManager[Send]]
"""Within the context the engine is ready; afterwards its processes are gone.

Raises EngineFailed."""


@contextlib.asynccontextmanager
async def process(
    command: Sequence[str | Path],
    log: Path,
    *,
    piped: bool = False,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A child that ends with the context: asked first, then killed. Raises EngineFailed when there
    is no such program. Its errors go to `log`; its output too, unless `piped`. `environment` is
    added to ours."""
    pipe = asyncio.subprocess.PIPE if piped else None
    with log.open("wb") as lines:
        try:
            child = await asyncio.create_subprocess_exec(
                *map(str, command),
                stdin=pipe,
                stdout=pipe or lines,
                stderr=lines,
                env={**os.environ, **(environment or {})},
            )
        except OSError as error:
            raise EngineFailed(f"cannot run {command[0]}: {error.strerror}") from error
        try:
            yield child
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.terminate()
            try:
                await asyncio.wait_for(child.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                child.kill()
                await child.wait()


async def wait_until_ready(
    child: asyncio.subprocess.Process, log: Path, is_ready: Callable[[], Awaitable[bool]]
) -> None:
    """Polls `is_ready`. Raises EngineFailed when the child ends or takes too long."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not await is_ready():
        if child.returncode is not None:
            raise EngineFailed(f"ended with exit code {child.returncode}: {last_line(log)}")
        if time.monotonic() > deadline_s:
            raise EngineFailed(f"not ready after {START_TIMEOUT_S:g} s: {last_line(log)}")
        await asyncio.sleep(POLL_S)


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def free_port() -> int:
    """A port of 127.0.0.1 that was free just now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
