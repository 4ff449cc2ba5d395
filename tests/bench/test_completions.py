"""The HTTP client counts what the server sent, however the bytes were cut, and tells failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest

from bench.load import Trace
from bench.peers.completions import complete, is_healthy
from bench.peers.engine import free_port

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def token(text: str) -> bytes:
    return event({"choices": [{"text": text, "finish_reason": None}]})


LENGTH = event({"choices": [{"text": "", "finish_reason": "length"}]})
USAGE = event(
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
)
DONE = b"data: [DONE]\n\n"
EVENTS = token("é") + token("") + token(" b") + LENGTH + USAGE + DONE


def chunks(body: bytes, size: int) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in [*parts, b""])


async def ask(writes: Sequence[bytes]) -> tuple[Trace, dict[str, object]]:
    """The trace of one request to a server that answers with these writes, and its body."""
    request: dict[str, object] = {}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        request.update(json.loads(await reader.readexactly(length)))
        for data in writes:
            writer.write(data)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        return await complete(port, "hi", 3, due_s=0.0), request


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_tokens_are_counted_across_the_borders_of_chunks(size: int) -> None:
    got, request = asyncio.run(ask([CHUNKED, chunks(EVENTS, size)]))
    assert got.error is None
    assert got.message_tokens == [1, 1, 1], "an empty text is half a character, so a token"
    assert (got.num_prompt_tokens, got.num_cached_tokens, got.num_output_tokens) == (7, 4, 3)
    assert got.message_s == sorted(got.message_s) and got.end_s >= got.message_s[-1]
    assert request["prompt"] == "hi" and request["max_tokens"] == 3
    assert request["ignore_eos"] is True and request["temperature"] == 0.0


def test_a_body_without_chunks_is_read_to_its_end() -> None:
    got, _ = asyncio.run(ask([OK + b"\r\n", EVENTS]))
    assert got.error is None and got.num_output_tokens == 3


def test_tokens_that_were_held_back_count_with_the_last_event() -> None:
    got, _ = asyncio.run(ask([OK + b"\r\n", token("a"), token("é"), LENGTH, USAGE, DONE]))
    assert got.message_tokens == [1, 2]


def test_more_events_than_tokens_are_not_hidden() -> None:
    got, _ = asyncio.run(ask([OK + b"\r\n", *[token("a")] * 5, USAGE, DONE]))
    assert sum(got.message_tokens) == 5 and got.num_output_tokens == 3


def test_the_last_token_may_come_with_the_finish_reason() -> None:
    last = event({"choices": [{"text": " b", "finish_reason": "length"}]})
    got, _ = asyncio.run(ask([OK + b"\r\n", token("a"), token("a"), last, USAGE, DONE]))
    assert got.message_tokens == [1, 1, 1]


@pytest.mark.parametrize(
    ("writes", "told"),
    [
        ([b"HTTP/1.1 503 Busy\r\n\r\n", b'{"error": "loading"}'], '503 {"error": "loading"}'),
        ([OK + b"\r\n", event({"error": {"message": "no slot"}})], "no slot"),
        ([CHUNKED, chunks(EVENTS, 10)[:60]], "IncompleteReadError"),
        ([b"nonsense\r\n\r\n"], "HttpFailed: 0"),
    ],
)
def test_a_failure_stands_in_the_trace(writes: list[bytes], told: str) -> None:
    got, _ = asyncio.run(ask(writes))
    assert got.error is not None and told in got.error
    assert got.end_s > 0


def test_nobody_there_is_told_too() -> None:
    port = free_port()
    got = asyncio.run(complete(port, "hi", 3, due_s=0.0))
    assert got.error is not None and "Connect" in got.error
    assert not asyncio.run(is_healthy(port))
