"""The client for programs that block; safe to share between threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.message import Message

from protos.quire.inference.v1 import inference_pb2
from quire_client.answer import Answer
from quire_client.calls import Calls, attach_request
from quire_client.config import ClientConfig
from quire_client.errors import call_error
from quire_client.requests import Prompt, as_request, chat_prompt


class Generation:
    """One running Generate call. Read it once: as events, as texts, or whole by `result`.

    All of them raise CallError. Whoever stops reading early calls `cancel`, or uses it in a `with`
    block, so that the server stops computing.
    """

    def __init__(self, call: Any, answer: Answer | None = None) -> None:
        """`answer` is what was read of the request before."""
        self._call = call
        self.answer = answer or Answer()
        """What has been read so far."""

    def __iter__(self) -> Iterator[inference_pb2.GenerateResponse]:
        """Every event, as it comes."""
        try:
            for event in self._call:
                self.answer.add(event)
                yield event
        except grpc.RpcError as error:
            raise call_error(error) from None

    def texts(self, sequence_index: int = 0) -> Iterator[str]:
        """The text of one sequence, as it becomes certain; never a part of a character."""
        for event in self:
            if event.HasField("delta") and event.sequence_index == sequence_index:
                yield event.delta.text

    def result(self) -> Answer:
        """Reads to the end."""
        for _ in self:
            pass
        return self.answer

    def cancel(self) -> None:
        """Stops the request in the server's next step; nothing happens when it has ended."""
        self._call.cancel()

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()


class Client:
    """Calls of one server; every method raises CallError. Close it, or use it in a `with` block."""

    def __init__(self, server: ClientConfig | str = "127.0.0.1:50051") -> None:
        """`server` is its address, or all there is to say of how to reach it."""
        self.config = ClientConfig(server) if isinstance(server, str) else server
        self.channel = self.config.channel()
        self._calls = Calls(self.config, self.channel)

    def close(self) -> None:
        """Ends what is open."""
        self.channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def generate(
        self,
        prompt: Prompt | inference_pb2.GenerateRequest,
        *,
        timeout_s: float | None = None,
        **parameters: Any,
    ) -> Generation:
        """Starts a request: a prompt with parameters as generate_request takes them, or a whole
        message. After `timeout_s` seconds it ends with DeadlineExceeded."""
        call = self._calls.start(as_request(prompt, parameters), timeout_s)
        return Generation(call)

    def attach(
        self,
        request_id: str,
        answer: Answer | None = None,
        *,
        disconnect: inference_pb2.DisconnectPolicy = inference_pb2.DISCONNECT_POLICY_UNSPECIFIED,
        timeout_s: float | None = None,
    ) -> Generation:
        """Takes up the stream of a request with DISCONNECT_POLICY_DETACH: after what `answer` has,
        which goes on to grow, or from its start. `disconnect` says what is to become of the request
        when this call ends before it does."""
        request = attach_request(request_id, answer, disconnect)
        call = self._calls.start(request, timeout_s)
        return Generation(call, answer)

    def tokenize(
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
        return list(self._call(request, timeout_s).token_ids)

    def detokenize(
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
        return str(self._call(request, timeout_s).text)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        model: str = "",
        timeout_s: float | None = None,
    ) -> inference_pb2.RenderChatResponse:
        """A conversation as the model's template writes it: its text and its token ids."""
        request = inference_pb2.RenderChatRequest(model=model, chat=chat_prompt(messages))
        rendered: inference_pb2.RenderChatResponse = self._call(request, timeout_s)
        return rendered

    def models(self, *, timeout_s: float | None = None) -> list[inference_pb2.Model]:
        """All that are served."""
        request = inference_pb2.ListModelsRequest()
        return list(self._call(request, timeout_s).models)

    def model(self, name: str = "", *, timeout_s: float | None = None) -> inference_pb2.Model:
        """One model; "" is the only one. NotFound when it is not served."""
        request = inference_pb2.GetModelRequest(name=name)
        response: inference_pb2.GetModelResponse = self._call(request, timeout_s)
        return response.model

    def _call(self, request: Message, timeout_s: float | None) -> Any:
        try:
            return self._calls.start(request, timeout_s)
        except grpc.RpcError as error:
            raise call_error(error) from None
