"""What clients of the simulator hear of log-probabilities: all that they asked for, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from scheduler_svc.core.messages import Event, NewRequest, PromptScored, TokensStep
from shared.ids import RequestId
from tests.told import told_of


class Receiving(Protocol):
    """A stream that has received some tokens."""

    received: list[int]


def wanted(number: int, *, is_beam: bool) -> tuple[int | None, int | None]:
    """How many likeliest tokens request `number` asks for, with its tokens and its prompt's."""
    if is_beam:
        return None, None
    return (None, 0, None, 2)[number % 4], (None, None, 1, None, None, 0)[number % 6]


class ScoreBook:
    """Checks every event against `tests.told`, which the workers tell by."""

    def __init__(self) -> None:
        self._requests: dict[RequestId, NewRequest] = {}
        self._num_scored: dict[RequestId, int] = {}

    def add(self, request: NewRequest) -> None:
        """A request that the scheduler took."""
        self._requests[request.request_id] = request
        self._num_scored[request.request_id] = 1

    def take(self, event: Event, streams: Mapping[RequestId, Sequence[Receiving]]) -> None:
        """An event, before its tokens join those that `streams` received."""
        if isinstance(event, TokensStep):
            self._take_tokens(event, streams)
        elif isinstance(event, PromptScored):
            self._take_prompt(event)

    def _take_tokens(
        self, step: TokensStep, streams: Mapping[RequestId, Sequence[Receiving]]
    ) -> None:
        told = step.logprobs or {}
        for at, (ref, token) in enumerate(zip(step.sequences, step.token_ids, strict=True)):
            request = self._requests[ref.request_id]
            num_top = request.sampling.num_logprobs
            assert (at in told) == (num_top is not None), "told without being asked, or not told"
            if num_top is not None:
                received = streams[ref.request_id][ref.sequence_index].received
                tokens = [*request.prompt_token_ids, *received, token]
                last = len(tokens) - 1
                assert told[at] == told_of(tokens, range(last, last + 1), num_top)
            if request.num_prompt_logprobs is not None and ref.sequence_index == 0:
                num_prompt = len(request.prompt_token_ids)
                assert self._num_scored[ref.request_id] == num_prompt, "a place is not told"

    def _take_prompt(self, event: PromptScored) -> None:
        request = self._requests[event.request_id]
        first = self._num_scored[event.request_id]
        assert event.offset == first, "a place of the prompt is lost or told twice"
        end = first + len(event.logprobs.log_probs)
        num_top = request.num_prompt_logprobs
        assert num_top is not None and end <= len(request.prompt_token_ids)
        assert event.logprobs == told_of(request.prompt_token_ids, range(first, end), num_top)
        self._num_scored[event.request_id] = end
