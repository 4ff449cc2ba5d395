"""The client for asyncio; it belongs to the loop on which it was made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.message import Message

from protos.quire.inference.v1 import inference_pb2
from quire_client.answer import Answer
from quire_client.calls import Calls, attach_request
from quire_client.config import ClientConfig
from quire_client.errors import Cancelled, call_error
from quire_client.requests import Prompt, as_request, chat_prompt


class AsyncGeneration:
    """One running Generate call. Read it once: as events, as texts, or whole by `result`.

    All of them raise CallError. Whoever stops reading early calls `cancel`, or uses it in a `async
    with` block, so that the server stops computing.
    """

    def __init__(self, call: Any, answer: Answer | None = None) -> None:
        """`answer` is what was read of the request before."""
        self._call = call
        self._is_cancelled = False
        self.answer = answer or Answer()
        """What has been read so far."""

    async def __aiter__(self) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Every event, as it comes."""
        try:
            async for event in self._call:
                self.answer.add(event)
                yield event
        except grpc.RpcError as error:
            raise call_error(error) from None
        except asyncio.CancelledError:
            if not self._is_cancelled:
                raise  # the reader's own task is to end
            raise Cancelled(grpc.StatusCode.CANCELLED, "the call was cancelled") from None

    async def texts(self, sequence_index: int = 0) -> AsyncIterator[str]:
        """The text of one sequence, as it becomes certain; never a part of a character."""
        async for event in self:
            if event.HasField("delta") and event.sequence_index == sequence_index:
                yield event.delta.text

    async def result(self) -> Answer:
        """Reads to the end."""
        async for _ in self:
            pass
        return self.answer

    def cancel(self) -> None:
        """Stops the request in the server's next step; nothing happens when it has ended."""
        self._is_cancelled = True
        self._call.cancel()

    async def __aenter__(self) -> AsyncGeneration:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()


class AsyncClient:
    """Calls of one server; every method raises CallError. Close it, or use it in a `with` block."""

    def __init__(self, server: ClientConfig | str = "127.0.0.1:50051") -> None:
        """`server` is its address, or all there is to say of how to reach it."""
        self.config = ClientConfig(server) if isinstance(server, str) else server
        self.channel = self.config.aio_channel()
        self._calls = Calls(self.config, self.channel)

    async def close(self) -> None:
        """Ends what is open."""
        await self.channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def generate(
        self,
        prompt: Prompt | inference_pb2.GenerateRequest,
        *,
        timeout_s: float | None = None,
        **parameters: Any,
    ) -> AsyncGeneration:
        """Starts a request: a prompt with parameters as generate_request takes them, or a whole
        message. After `timeout_s` seconds it ends with DeadlineExceeded."""
        call = self._calls.start(as_request(prompt, parameters), timeout_s)
        return AsyncGeneration(call)

    def attach(
        self,
        request_id: str,
        answer: Answer | None = None,
        *,
        disconnect: inference_pb2.DisconnectPolicy = inference_pb2.DISCONNECT_POLICY_UNSPECIFIED,
        timeout_s: float | None = None,
    ) -> AsyncGeneration:
        """Takes up the stream of a request with DISCONNECT_POLICY_DETACH: after what `answer` has,
        which goes on to grow, or from its start. `disconnect` says what is to become of the request
        when this call ends before it does."""
        request = attach_request(request_id, answer, disconnect)
        call = self._calls.start(request, timeout_s)
        return AsyncGeneration(call, answer)

    async def tokenize(
        self,
        text: str,
        *,
        model: str = "",
        add_special_tokens: bool = True,
        timeout_s: float | None = None,
    ) -> list[int]:
        """The token ids of a text, with those that the model expects around it if asked."""
        request = inference_pb2.TokenizeRequest(
            model=model, text=text, add_special_tokens=add_special_tokens
        )
        return list((await self._call(request, timeout_s)).token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = False,
        timeout_s: float | None = None,
    ) -> str:
        """The text of token ids."""
        request = inference_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        return str((await self._call(request, timeout_s)).text)

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        model: str = "",
        timeout_s: float | None = None,
    ) -> inference_pb2.RenderChatResponse:
        """A conversation as the model's template writes it: its text and its token ids."""
        request = inference_pb2.RenderChatRequest(model=model, chat=chat_prompt(messages))
        rendered: inference_pb2.RenderChatResponse = await self._call(request, timeout_s)
        return rendered

    async def models(self, *, timeout_s: float | None = None) -> list[inference_pb2.Model]:
        """All that are served."""
        request = inference_pb2.ListModelsRequest()
        return list((await self._call(request, timeout_s)).models)

    async def model(self, name: str = "", *, timeout_s: float | None = None) -> inference_pb2.Model:
        """One model; "" is the only one. NotFound when it is not served."""
        request = inference_pb2.GetModelRequest(name=name)
        response: inference_pb2.GetModelResponse = await self._call(request, timeout_s)
        return response.model

    async def _call(self, request: Message, timeout_s: float | None) -> Any:
        try:
            return await self._calls.start(request, timeout_s)
        except grpc.RpcError as error:
            raise call_error(error) from None
