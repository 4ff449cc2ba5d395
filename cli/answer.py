"""One streamed answer, seen from the terminal: text as it comes, then the figures."""

from __future__ import annotations

import time
from collections.abc import Iterator

from protos.quire.inference.v1 import inference_pb2
from quire_client import Answer, Client


class TimedAnswer:
    """Runs one request. Iterate over `texts()`; afterwards the fields tell the rest."""

    def __init__(self, client: Client, request: inference_pb2.GenerateRequest) -> None:
        self._client = client
        self._request = request
        self.answer = Answer()
        self.first_token_s: float | None = None
        """Seconds from the call to the first token."""
        self.total_s = 0.0
        """Seconds from the call to the end."""

    def texts(self) -> Iterator[str]:
        """Yields text as it becomes certain. Leaving the loop early cancels the call.

        Raises CallError.
        """
        begin_s = time.perf_counter()
        try:
            with self._client.generate(self._request) as generation:
                self.answer = generation.answer
                for text in generation.texts():
                    if self.first_token_s is None:
                        self.first_token_s = time.perf_counter() - begin_s
                    yield text
        finally:
            self.total_s = time.perf_counter() - begin_s

    @property
    def num_output_tokens(self) -> int:
        finished = self.answer.first.finished
        return finished.usage.num_output_tokens if finished else len(self.answer.token_ids)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second once the prompt was computed: those after the first, over their time."""
        if self.first_token_s is None or self.num_output_tokens < 2:
            return None
        return (self.num_output_tokens - 1) / max(self.total_s - self.first_token_s, 1e-9)

    @property
    def reason(self) -> str:
        """The finish reason's short name, such as "EOS"; "STOPPED" when it broke off."""
        return self.answer.first.finish_reason or "STOPPED"

    def summary(self) -> str:
        """One line of figures."""
        first_ms = 1000.0 * (self.first_token_s or 0.0)
        rate = f"{self.tokens_per_s:.1f} tokens/s, " if self.tokens_per_s else ""
        prompt = ""
        started = self.answer.started
        if started is not None:
            cached = started.num_cached_tokens
            prompt = f", prompt {started.num_prompt_tokens} tokens ({cached} cached)"
        return (
            f"{self.num_output_tokens} tokens in {self.total_s:.2f} s, {rate}"
            f"first after {first_ms:.0f} ms{prompt}, ended by {self.reason}"
        )
