"""Requests that outlive their calls, as tests send and take them up."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from protos.quire.inference.v1 import inference_pb2
from tests.api.serving import Served, request

DETACH = inference_pb2.DISCONNECT_POLICY_DETACH
ABORT = inference_pb2.DISCONNECT_POLICY_ABORT
Responses = list[inference_pb2.GenerateResponse]


def detachable(text: str = "hello", **fields: Any) -> inference_pb2.GenerateRequest:
    return request(text, **{"request_id": "mine", "disconnect": DETACH, **fields})


def attach(served: Served, after_event: int, *, metadata: Any = None, **fields: Any) -> Any:
    message = inference_pb2.AttachRequest(
        **{"request_id": "mine", "after_event": after_event, **fields}
    )
    return served.generation.Attach(message, metadata=metadata)


async def some(call: Any, num_events: int) -> Responses:
    """Reads so many events, or to the end, and then cancels the call."""
    responses: Responses = []
    while len(responses) < num_events:
        response = await call.read()
        if response is grpc.aio.EOF:
            break
        responses.append(response)
    call.cancel()
    return responses


def numbers(responses: Responses) -> list[int]:
    return [response.event_number for response in responses]


async def until_detached(served: Served, num_streams: int = 0) -> None:
    """Returns when but so many calls are open."""
    while (await served.state()).num_streams > num_streams:
        await served.status()


async def forgotten(served: Served) -> None:
    """Returns when nothing can be attached to."""
    while (await served.state()).num_detachable:
        await asyncio.sleep(0.05)
