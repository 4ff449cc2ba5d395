"""Random calls of every RPC that the two ports offer, as messages and as bytes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from protos.quire.admin.v1 import admin_pb2
from protos.quire.inference.v1 import inference_pb2
from tests.fuzz.messages import mutated, perturb

CALL_LIMIT_S = 3.0
ANSWER_LIMIT_S = 20.0
"""Beyond the deadline of any call: what has no status then hangs."""
PLANNED = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
VALID: dict[str, tuple[Message, ...]] = {
    "GenerateRequest": (
        inference_pb2.GenerateRequest(
            text="hello", stopping=inference_pb2.StoppingParams(max_tokens=6)
        ),
        inference_pb2.GenerateRequest(
            chat=inference_pb2.ChatPrompt(
                messages=[inference_pb2.ChatMessage(role="user", content="hello")]
            ),
            stopping=inference_pb2.StoppingParams(max_tokens=40, stop_strings=["ab", "xyz"]),
        ),
        inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=range(40)),
            sampling=inference_pb2.SamplingParams(n=3, seed=1),
            stopping=inference_pb2.StoppingParams(max_tokens=20),
        ),
        inference_pb2.GenerateRequest(
            text="hello",
            beam=inference_pb2.BeamParams(width=3),
            stopping=inference_pb2.StoppingParams(max_tokens=10),
        ),
        inference_pb2.GenerateRequest(text="hello", regex="[a-f]{4}-[0-9]+"),
        inference_pb2.GenerateRequest(
            text="hello",
            json_schema='{"type": "array", "items": {"enum": ["a", 1]}, "maxItems": 3}',
            sampling=inference_pb2.SamplingParams(n=2),
        ),
        inference_pb2.GenerateRequest(
            text="hello",
            grammar="start: A\nA: " + " & ".join(f"/.*a.{{{i % 20}}}/" for i in range(50)),
        ),
    ),
    "TokenizeRequest": (inference_pb2.TokenizeRequest(text="hello"),),
    "DetokenizeRequest": (inference_pb2.DetokenizeRequest(token_ids=[104, 105]),),
}


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC."""

    path: str
    request: type[Message]
    is_stream: bool


def methods_of(file: Any) -> list[Method]:
    """All RPCs of a contract."""
    return [
        Method(
            f"/{service.full_name}/{method.name}",
            GetMessageClass(method.input_type),
            method.server_streaming,
        )
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]


@dataclass
class Caller:
    """Makes random calls at the two ports, and remembers what came of them."""

    api: grpc.aio.Channel
    admin: grpc.aio.Channel
    chance: random.Random
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    """Answers that no contract knows."""

    def __post_init__(self) -> None:
        public = [(self.api, method) for method in methods_of(inference_pb2)]
        operator = [(self.admin, method) for method in methods_of(admin_pb2)]
        generate = [pair for pair in public if pair[1].path.endswith("/Generate")]
        self._methods = [*public, *operator, *generate * 8]

    async def call(self) -> None:
        """One random call, to its end."""
        channel, method = self.chance.choice(self._methods)
        data, is_message = self._request(method)
        num_read = self.chance.choice((0, 1, 3, 10**6, 10**6, 10**6))
        timeout_s = self.chance.choice((0.001, 0.05, CALL_LIMIT_S, CALL_LIMIT_S))
        try:
            code, details = await asyncio.wait_for(
                self._ended(channel, method, data, num_read, timeout_s), ANSWER_LIMIT_S
            )
        except TimeoutError:
            self.failures.append(f"{method.path} never ended: {data!r}")
            return
        self.outcomes[f"{method.path.rpartition('/')[2]} {code.name}"] += 1
        if code not in PLANNED and (is_message or "log id" in details):
            self.failures.append(f"{method.path}: {code.name} {details}: {data[:500]!r}")

    def _request(self, method: Method) -> tuple[bytes, bool]:
        """The bytes to send, and whether they are a message of the method."""
        name = method.request.DESCRIPTOR.name
        message = method.request()
        valid = VALID.get(name, ())
        if valid and self.chance.random() < 0.7:
            message.CopyFrom(self.chance.choice(valid))
            perturb(message, self.chance, 0.04)
        else:
            perturb(message, self.chance, 0.3)
        data = message.SerializeToString()
        if self.chance.random() < 0.25:
            data = mutated(data, self.chance)
        try:
            method.request.FromString(data)
        except DecodeError:
            return data, False
        return data, True

    async def _ended(
        self,
        channel: grpc.aio.Channel,
        method: Method,
        data: bytes,
        num_read: int,
        timeout_s: float,
    ) -> tuple[grpc.StatusCode, str]:
        if not method.is_stream:
            call = channel.unary_unary(method.path)(data, timeout=timeout_s)
        else:
            call = channel.unary_stream(method.path)(data, timeout=timeout_s)
            try:
                async for _ in call:
                    num_read -= 1
                    if num_read <= 0:
                        call.cancel()
            except (grpc.aio.AioRpcError, asyncio.CancelledError):
                pass
        return await call.code(), await call.details() or ""
