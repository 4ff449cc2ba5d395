"""A client for OpenAI-style servers: streams /v1/completions and notes when each token came.

Plain HTTP/1.1 over asyncio, so that the client costs the measured machine as little as it can.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from bench.load import Trace

DATA = b"data:"
DONE = b"[DONE]"


class HttpFailed(Exception):
    """The server's answer was no stream of events; status and body."""


async def complete(port: int, prompt: str, max_tokens: int, due_s: float) -> Trace:
    """Streams one greedy answer of exactly `max_tokens` from a server on 127.0.0.1."""
    trace = Trace(due_s)
    request = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        async for event in _events(port, request):
            note(trace, event)
    except (HttpFailed, OSError, EOFError, ValueError) as error:
        trace.error = f"{type(error).__name__}: {error}"
    trace.end_s = time.perf_counter()
    return trace


def note(trace: Trace, event: dict[str, Any]) -> None:
    """Adds one event. Servers send an event for each token, but may hold a token back that ends
    within a character; how many those were is known at the end, and they count with the last event.
    An event that only tells the finish reason carries no token."""
    for choice in event.get("choices", ()):
        if choice.get("text") or choice.get("finish_reason") is None:
            trace.message_s.append(time.perf_counter())
            trace.message_tokens.append(1)
    if usage := event.get("usage"):
        trace.num_prompt_tokens = usage["prompt_tokens"]
        trace.num_output_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        trace.num_cached_tokens = details.get("cached_tokens", 0)
        if trace.message_tokens:
            held_back = trace.num_output_tokens - sum(trace.message_tokens)
            trace.message_tokens[-1] += max(held_back, 0)
    if "error" in event:
        trace.error = str(event["error"])


async def is_healthy(port: int) -> bool:
    """Whether GET /health says 200."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        return await _status(reader) == 200
    except (OSError, ValueError):
        return False
    finally:
        writer.close()


async def _events(port: int, request: dict[str, object]) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event, as soon as it is there."""
    body = json.dumps(request).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        status = await _status(reader)
        chunked = await _skip_headers(reader)
        if status != 200:
            text = (await reader.read()).decode(errors="replace")
            raise HttpFailed(f"{status} {' '.join(text.split())}")
        async for line in _lines(reader, chunked):
            if line.startswith(DATA) and (data := line[len(DATA) :].strip()) != DONE:
                yield json.loads(data)
    finally:
        writer.close()


async def _status(reader: asyncio.StreamReader) -> int:
    line = await reader.readline()
    return int(line.split()[1]) if line.startswith(b"HTTP/1.") else 0


async def _skip_headers(reader: asyncio.StreamReader) -> bool:
    """Whether the body comes in chunks (RFC 9112, 7.1)."""
    chunked = False
    while (line := (await reader.readline()).strip().lower()) != b"":
        name, _, value = line.partition(b":")
        chunked |= name == b"transfer-encoding" and value.strip() == b"chunked"
    return chunked


async def _lines(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """Whole lines of the body, across the borders of chunks."""
    if not chunked:
        async for line in reader:
            yield line
        return
    rest = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        *lines, rest = (rest + await reader.readexactly(size)).split(b"\n")
        await reader.readexactly(2)
        for line in lines:
            yield line
