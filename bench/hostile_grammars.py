"""How long hostile constraints take to be refused, and what they do to ordinary ones beside them.

    quire serve --model MODEL -- python -m bench.hostile_grammars

First each alone, then COPIES of each costly one at once, while a client sends an ordinary schema
that is new after the other. Each is sent with a mark of its own, so that none is known already.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import grpc
import uvloop

from protos.quire.inference.v1 import inference_pb2, inference_pb2_grpc

NUM_ALONE = 3
COPIES = 10
NUM_ORDINARY = 20
COSTLY_MS = 20.0
REFUSALS = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED})
LATE_REFUSAL = "lexer error: "
"""How the message begins of one that a fast machine compiled in time, and that cost too much at its
first token."""


def _schema(mark: str, **keywords: Any) -> dict[str, Any]:
    return {"json_schema": json.dumps({"title": mark, **keywords})}


def _grammar(mark: str, text: str) -> dict[str, Any]:
    return {"grammar": f"{text}\nUNUSED: /{mark}/"}


def _together(patterns: list[str]) -> list[dict[str, Any]]:
    return [{"type": "string", "pattern": pattern} for pattern in patterns]


def _chain(length: int) -> str:
    rules = [f"r{i}: r{i + 1}" for i in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "a"'])


def _doubled(depth: int) -> dict[str, Any]:
    """Each definition holds the next one twice."""
    items = [{"$ref": f"#/$defs/d{i + 1}"} for i in range(depth)]
    return {
        f"d{i}": {"type": "array", "prefixItems": [item, item], "items": False}
        for i, item in enumerate(items)
    } | {f"d{depth}": {"type": "null"}}


HOSTILE: dict[str, Callable[[str], dict[str, Any]]] = {
    "a megabyte": lambda mark: _schema(mark, description="x" * 1_000_000),
    "nested schema": lambda mark: {"json_schema": '{"items":' * 5000 + "true" + "}" * 5000},
    "nested properties": lambda mark: {
        "json_schema": '{"properties":{"a":' * 200 + f'{{"title":"{mark}"}}' + "}}" * 200
    },
    "nested pattern": lambda mark: {"regex": "(" * 20_000 + mark + ")" * 20_000},
    "nested grammar": lambda mark: _grammar(mark, "start: " + "(" * 20_000),
    "unknown keyword": lambda mark: _schema(mark, unevaluatedItems=False),
    "product of choices": lambda mark: _schema(
        mark, allOf=[{"anyOf": [{"minimum": i}, {"maximum": -i}]} for i in range(20)]
    ),
    "doubled references": lambda mark: _schema(mark, **{"$ref": "#/$defs/d0"}, **_defs(200)),
    "6,000 required": lambda mark: _schema(
        mark, type="object", required=[f"k{i}" for i in range(6000)]
    ),
    "2,500 properties": lambda mark: _schema(
        mark, type="object", properties={f"k{i}": {"type": "string"} for i in range(2500)}
    ),
    "a large divisor": lambda mark: _schema(mark, type="integer", multipleOf=999_983),
    "divisors": lambda mark: _schema(
        mark, allOf=[{"type": "integer", "multipleOf": p} for p in (2, 3, 5, 7, 11, 13, 17, 19)]
    ),
    "patterns at once": lambda mark: _schema(
        mark, allOf=_together([f".*a.{{{i}}}$" for i in range(4, 18)])
    ),
    "many patterns at once": lambda mark: _schema(
        mark, allOf=_together([f"a.{{{i}}}b" for i in range(60)])
    ),
    "classes": lambda mark: {
        "regex": mark + "|".join(rf"\p{{L}}{{{i}}}\p{{N}}" for i in range(1, 2000))
    },
    "intersections": lambda mark: _grammar(
        mark, "start: A\nA: " + " & ".join(f"/.*a.{{{i % 20}}}/" for i in range(50))
    ),
    "more intersections": lambda mark: _grammar(
        mark, "start: A\nA: " + " & ".join(f"/.*a.{{{i % 40}}}.*/" for i in range(200))
    ),
    "chain of rules": lambda mark: _grammar(mark, _chain(3000)),
    "longer chain": lambda mark: _grammar(mark, _chain(5000)),
}


def _defs(depth: int) -> dict[str, Any]:
    return {"$defs": _doubled(depth)}


def ordinary(mark: str) -> dict[str, Any]:
    """What a client may ask for."""
    properties = {
        "name": {"type": "string", "maxLength": 20},
        "size": {"enum": ["small", "large"]},
        "parts": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
    }
    required = list(properties)
    return _schema(mark, type="object", properties=properties, required=required)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one call."""

    code: grpc.StatusCode
    message: str
    took_ms: float


class Sender:
    """Sends requests of one token with a constraint."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._generation = inference_pb2_grpc.GenerationServiceStub(channel)
        self._marks = (f"m{os.getpid()}n{number}" for number in count())

    async def send(self, make: Callable[[str], dict[str, Any]]) -> Outcome:
        """One call to its end."""
        request = inference_pb2.GenerateRequest(
            text="x", stopping=inference_pb2.StoppingParams(max_tokens=1), **make(next(self._marks))
        )
        code, message = grpc.StatusCode.OK, ""
        began_s = time.perf_counter()
        try:
            async for _ in self._generation.Generate(request, timeout=60):
                pass
        except grpc.aio.AioRpcError as error:
            code, message = error.code(), error.details() or ""
        return Outcome(code, message, 1000 * (time.perf_counter() - began_s))

    async def ordinary(self) -> list[float]:
        """Milliseconds of new ordinary ones, one after the other."""
        outcomes = [await self.send(ordinary) for _ in range(NUM_ORDINARY)]
        assert all(outcome.code is grpc.StatusCode.OK for outcome in outcomes), outcomes
        return [outcome.took_ms for outcome in outcomes]


def _spread(values: list[float]) -> str:
    return f"median {statistics.median(values):7.1f} ms, most {max(values):7.1f} ms"


def _is_refused(outcome: Outcome) -> bool:
    if outcome.code is grpc.StatusCode.ABORTED:
        return outcome.message.startswith(LATE_REFUSAL)
    return outcome.code in REFUSALS


async def measure(address: str) -> None:
    """Prints the table."""
    async with grpc.aio.insecure_channel(address) as channel:
        sender = Sender(channel)
        await sender.ordinary()
        print(f"ordinary ones alone: {_spread(await sender.ordinary())}", flush=True)
        costly = []
        for name, make in HOSTILE.items():
            outcomes = [await sender.send(make) for _ in range(NUM_ALONE)]
            assert all(map(_is_refused, outcomes)), (name, outcomes)
            took_ms = [outcome.took_ms for outcome in outcomes]
            if statistics.median(took_ms) > COSTLY_MS:
                costly.append(name)
            print(f"{name:24} {_spread(took_ms)}: {outcomes[0].message[:60]}", flush=True)
        print(f"\n{COPIES} at once, and ordinary ones beside them")
        for name in costly:
            beside = asyncio.create_task(sender.ordinary())
            outcomes = await asyncio.gather(*(sender.send(HOSTILE[name]) for _ in range(COPIES)))
            assert all(map(_is_refused, outcomes)), (name, outcomes)
            took_ms = [outcome.took_ms for outcome in outcomes]
            print(f"{name:24} {_spread(took_ms)}; ordinary {_spread(await beside)}", flush=True)


def main() -> None:
    """Measures one server."""
    parser = argparse.ArgumentParser(prog="python -m bench.hostile_grammars", description=__doc__)
    default = os.environ.get("QUIRE_SERVER", "127.0.0.1:50051")
    parser.add_argument("--server", default=default, help="address of a running server")
    uvloop.run(measure(parser.parse_args().server))


if __name__ == "__main__":
    main()
