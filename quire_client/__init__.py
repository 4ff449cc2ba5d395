"""A client for Quire, sync and async: needs grpcio and protobuf, and nothing of the server.

    with Client("127.0.0.1:50051") as client:
        for text in client.generate("Once upon a time", max_tokens=64).texts():
            print(text, end="")

Requests and events are the messages of the contract; see docs/API.md for each call.
"""

from quire_client.aio import AsyncClient, AsyncGeneration
from quire_client.answer import Answer, SequenceAnswer
from quire_client.client import Client, Generation
from quire_client.config import ClientConfig
from quire_client.errors import (
    Aborted,
    AlreadyExists,
    CallError,
    Cancelled,
    DeadlineExceeded,
    FieldViolation,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    call_error,
)
from quire_client.requests import Prompt, chat_prompt, generate_request

__all__ = [
    "Aborted",
    "AlreadyExists",
    "Answer",
    "AsyncClient",
    "AsyncGeneration",
    "CallError",
    "Cancelled",
    "Client",
    "ClientConfig",
    "DeadlineExceeded",
    "FieldViolation",
    "Generation",
    "InvalidArgument",
    "NotFound",
    "Prompt",
    "ResourceExhausted",
    "SequenceAnswer",
    "Unauthenticated",
    "Unavailable",
    "call_error",
    "chat_prompt",
    "generate_request",
]
