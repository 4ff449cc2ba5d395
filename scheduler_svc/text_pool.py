"""The served model's text, off the event loop."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_svc.bounded_threads import BoundedThreads
from scheduler_svc.text.tokenizer import TextModel
from shared.errors import ResourceExhausted

NUM_THREADS = 2
RETRY_AFTER_S = 1.0
MAX_PENDING = 512
"""Calls that run or wait for a thread; further ones get RESOURCE_EXHAUSTED."""


class TextPool:
    """Tokenizes, detokenizes and renders without holding up the engine's loop."""

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self._threads = BoundedThreads(
            NUM_THREADS,
            MAX_PENDING,
            lambda: ResourceExhausted(
                "max_pending_text_calls",
                f"{MAX_PENDING} texts wait to be tokenized or rendered",
                RETRY_AFTER_S,
            ),
        )

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text."""
        return await self._threads.run(
            lambda: self._model.encode(text, add_special_tokens=add_special_tokens)
        )

    async def bad_word_ids(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """The token sequences of bad words; see TextModel."""
        return await self._threads.run(lambda: self._model.bad_word_ids(words))

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids; InvalidArgument for one beyond the vocabulary."""
        return await self._threads.run(
            lambda: self._model.decode(token_ids, skip_special_tokens=skip_special_tokens),
        )

    async def render_chat(self, messages: list[tuple[str, str]]) -> tuple[str, list[int]]:
        """The text that the chat template gives for (role, content) turns, and its ids.

        Raises InvalidArgument when the model has no template, or it refuses or is slow.
        """

        def render() -> tuple[str, list[int]]:
            text = self._model.render_chat(messages)
            return text, self._model.encode_rendered(text)

        return await self._threads.run(render)

    def close(self) -> None:
        """Lets go of the threads; a call that still runs is left to end by itself."""
        self._threads.close()
