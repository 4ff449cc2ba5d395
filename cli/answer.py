"""One streamed answer, seen from the terminal: text as it comes, then the figures."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import grpc

from protos.quire.inference.v1 import inference_pb2, inference_pb2_grpc


@dataclass(slots=True)
class Answer:
    """Runs one Generate call. Iterate over `texts()`; afterwards the fields tell the rest."""

    channel: grpc.Channel
    request: inference_pb2.GenerateRequest
    metadata: Sequence[tuple[str, str]] = ()
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    started: inference_pb2.Started | None = None
    finished: inference_pb2.Finished | None = None
    first_token_s: float | None = None
    """Seconds from the call to the first token."""
    total_s: float = 0.0
    """Seconds from the call to the end."""

    def texts(self) -> Iterator[str]:
        """Yields text as it becomes certain. Leaving the loop early cancels the call.

        Raises grpc.RpcError.
        """
        begin_s = time.perf_counter()
        stub = inference_pb2_grpc.GenerationServiceStub(self.channel)
        call = stub.Generate(self.request, metadata=tuple(self.metadata))
        try:
            for response in call:
                event = response.WhichOneof("event")
                if event == "delta":
                    if self.first_token_s is None:
                        self.first_token_s = time.perf_counter() - begin_s
                    self.token_ids.extend(response.delta.token_ids)
                    self.text += response.delta.text
                    yield response.delta.text
                elif event == "started":
                    self.started = response.started
                elif event == "finished":
                    self.finished = response.finished
        finally:
            call.cancel()
            self.total_s = time.perf_counter() - begin_s

    @property
    def num_output_tokens(self) -> int:
        usage = self.finished.usage.num_output_tokens if self.finished else 0
        return usage or len(self.token_ids)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second once the prompt was computed: those after the first, over their time."""
        if self.first_token_s is None or self.num_output_tokens < 2:
            return None
        return (self.num_output_tokens - 1) / max(self.total_s - self.first_token_s, 1e-9)

    @property
    def reason(self) -> str:
        """The finish reason's short name, such as "EOS"."""
        if self.finished is None:
            return "STOPPED"
        name = inference_pb2.FinishReason.Name(self.finished.reason)
        return name.removeprefix("FINISH_REASON_")

    def summary(self) -> str:
        """One line of figures."""
        first_ms = 1000.0 * (self.first_token_s or 0.0)
        rate = f"{self.tokens_per_s:.1f} tokens/s, " if self.tokens_per_s else ""
        prompt = ""
        if self.started is not None:
            cached = self.started.num_cached_tokens
            prompt = f", prompt {self.started.num_prompt_tokens} tokens ({cached} cached)"
        return (
            f"{self.num_output_tokens} tokens in {self.total_s:.2f} s, {rate}"
            f"first after {first_ms:.0f} ms{prompt}, ended by {self.reason}"
        )
