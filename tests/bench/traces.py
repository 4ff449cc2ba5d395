"""Hand-made traces, and an engine made of them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

from bench.load import Trace
from bench.peers.engine import Send, Setup, Start


def trace(due_s: float, *message_s: float, num_prompt_tokens: int = 3) -> Trace:
    """One token in each message; ends with the last of them."""
    return Trace(
        due_s,
        list(message_s),
        [1] * len(message_s),
        message_s[-1],
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=len(message_s),
    )


def engine(answer: Callable[[int, float], Trace]) -> Start:
    """Answers (max_tokens, due_s) at once."""

    @contextlib.asynccontextmanager
    async def start(_setup: Setup) -> AsyncIterator[Send]:
        async def send(_prompt: str, max_tokens: int, due_s: float) -> Trace:
            return answer(max_tokens, due_s)

        yield send

    return start


def steady(max_tokens: int, due_s: float) -> Trace:
    """A token each 10 ms."""
    return trace(due_s, *(due_s + 0.01 * (index + 1) for index in range(max_tokens)))
