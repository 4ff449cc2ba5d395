"""Engines' processes start, are told apart from broken ones, and are gone afterwards."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from bench.load import Trace
from bench.peers.engine import EngineFailed, process, wait_until_ready
from bench.peers.openvino import Link

CHILD = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
requests = [json.loads(sys.stdin.readline()) for _ in range(2)]
def step(at_s, tokens, ended):
    print(json.dumps({"at_s": at_s, "tokens": tokens, "ended": ended}), flush=True)
step(10.0, {0: 1, 1: 1}, {})
step(11.0, {0: 2}, {0: 5})
if requests[1]["prompt"] == "fall":
    sys.exit(1)
step(12.0, {1: 1}, {1: 9})
sys.stdin.read()
"""


async def two_requests(log: Path, second: str) -> list[Trace]:
    async with process([sys.executable, "-c", CHILD], log, piped=True) as child:
        link = Link(child)
        assert await link.is_ready()
        pump = asyncio.create_task(link.pump())
        traces = await asyncio.gather(link.send("one", 3, 9.0), link.send(second, 2, 9.5))
        pump.cancel()
        return list(traces)


def test_steps_become_traces(tmp_path: Path) -> None:
    one, two = asyncio.run(two_requests(tmp_path / "log", "two"))
    assert (one.message_s, one.message_tokens) == ([10.0, 11.0], [1, 2])
    assert (one.num_prompt_tokens, one.num_output_tokens, one.end_s) == (5, 3, 11.0)
    assert (two.message_s, two.message_tokens) == ([10.0, 12.0], [1, 1])
    assert (two.num_prompt_tokens, two.num_output_tokens, two.end_s) == (9, 2, 12.0)
    assert one.error is None and two.error is None


def test_requests_of_an_engine_that_dies_fail(tmp_path: Path) -> None:
    one, two = asyncio.run(two_requests(tmp_path / "log", "fall"))
    assert one.error is None and one.num_output_tokens == 3
    assert two.error == "the engine's process ended"


async def not_yet() -> bool:
    return False


async def never_ready(log: Path, code: str) -> None:
    async with process([sys.executable, "-c", code], log) as child:
        await wait_until_ready(child, log, not_yet)


def test_an_engine_that_ends_while_it_starts_is_told_with_its_last_words(tmp_path: Path) -> None:
    code = "print('loading', flush=True); raise SystemExit('no such model')"
    with pytest.raises(EngineFailed, match="exit code 1: no such model"):
        asyncio.run(never_ready(tmp_path / "log", code))


def test_an_engine_that_is_not_installed_is_told(tmp_path: Path) -> None:
    async def start() -> None:
        async with process([tmp_path / "llama-server"], tmp_path / "log"):
            pass

    with pytest.raises(EngineFailed, match=r"cannot run .*llama-server: No such file"):
        asyncio.run(start())


def test_the_process_is_gone_also_after_an_error(tmp_path: Path) -> None:
    async def start() -> asyncio.subprocess.Process:
        try:
            async with process([sys.executable, "-c", "input()"], tmp_path / "log") as child:
                raise KeyError
        except KeyError:
            return child

    assert asyncio.run(start()).returncode is not None
