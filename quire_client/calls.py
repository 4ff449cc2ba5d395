"""The calls of one channel, as messages: the same for both clients."""

from __future__ import annotations

from typing import Any

import grpc

from protos.quire.inference.v1 import inference_pb2, inference_pb2_grpc
from quire_client.answer import Answer
from quire_client.config import ClientConfig


class Calls:
    """Each gives what the channel gives: on a blocking one the response or an iterator of events,
    on one of asyncio what is awaited or iterated."""

    def __init__(self, config: ClientConfig, channel: grpc.Channel | grpc.aio.Channel) -> None:
        self._config = config
        generation = inference_pb2_grpc.GenerationServiceStub(channel)
        tokenizer = inference_pb2_grpc.TokenizerServiceStub(channel)
        models = inference_pb2_grpc.ModelServiceStub(channel)
        self._methods: dict[type, Any] = {
            inference_pb2.GenerateRequest: generation.Generate,
            inference_pb2.AttachRequest: generation.Attach,
            inference_pb2.TokenizeRequest: tokenizer.Tokenize,
            inference_pb2.DetokenizeRequest: tokenizer.Detokenize,
            inference_pb2.RenderChatRequest: tokenizer.RenderChat,
            inference_pb2.ListModelsRequest: models.ListModels,
            inference_pb2.GetModelRequest: models.GetModel,
        }

    def start(self, request: Any, timeout_s: float | None) -> Any:
        """Starts the call that takes `request`."""
        method = self._methods[type(request)]
        return method(request, metadata=self._config.metadata, timeout=timeout_s)


def attach_request(
    request_id: str, answer: Answer | None, disconnect: inference_pb2.DisconnectPolicy
) -> inference_pb2.AttachRequest:
    """Takes up a stream after what `answer` has, or from its start."""
    return inference_pb2.AttachRequest(
        request_id=request_id,
        after_event=0 if answer is None else answer.last_event,
        disconnect=disconnect,
    )
