"""The text of one sequence, token by token: whole characters only, stop strings found.

Tokens are bytes (text/token_bytes.py). A UTF-8 decoder keeps the start of a character until its
rest comes; the stop-string matcher keeps what may become a stop string. Both cost constant time per
byte, so a long answer is no slower at its end than at its start.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from scheduler_svc.text.stop_strings import StopStringMatcher

MAX_PARTIAL_BYTES = 3  # of a character of four


class TextDelta(NamedTuple):
    """What some tokens added to the text."""

    text: str
    """The text that became certain, without what follows the stop string, and without itself unless
    it is to be included."""
    stop_string: str | None
    """The stop string that ended the sequence."""
    num_tokens_kept: int
    """How many of the tokens belong to the sequence: all, or those up to the one that completed the
    stop string."""


class SequenceText:
    """Decodes one sequence. The texts of all deltas and of flush() joined are the decoding of its
    tokens, up to a stop string.

    Where the prompt ends within a character, the first tokens may complete it: the character is
    then delivered whole, and nothing else of the prompt ever is.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        skipped_ids: frozenset[int],
        prompt_token_ids: Sequence[int],
        stop_strings: Sequence[str],
        strips_leading_space: bool,
        *,
        include_stop_string: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`token_bytes` by id; `skipped_ids` are no text. `strips_leading_space` applies to a
        sequence without a prompt, whose text starts at its first token. With `include_stop_string`
        the text ends with the stop string; the text that becomes certain by one of the first
        `min_tokens` tokens is not searched for any."""
        self._token_bytes = token_bytes
        self._skipped_ids = skipped_ids
        self._partial = b""
        """The start of a character whose rest has not come."""
        self._prompt_rest = self._partial_character(prompt_token_ids)
        """Bytes of the prompt that wait for the rest of their character."""
        self._strips_space = strips_leading_space and not prompt_token_ids
        self._matcher = StopStringMatcher(stop_strings, include_match=include_stop_string)
        self._num_unsearched = min_tokens
        self.has_stop_strings = bool(stop_strings)
        self._is_stopped = False

    def append(self, token_ids: Sequence[int]) -> TextDelta:
        """Take the next tokens, looking for stop strings in their text. After one was found nothing
        may be appended."""
        assert not self._is_stopped
        texts: list[str] = []
        for num_tokens, token_id in enumerate(token_ids, start=1):
            if self._num_unsearched:
                self._num_unsearched -= 1
                texts.append(self.decode((token_id,)))
                continue
            text, match = self._matcher.append(self.decode((token_id,)))
            texts.append(text)
            if match is not None:
                self._is_stopped = True
                return TextDelta("".join(texts), match.stop_string, num_tokens)
        return TextDelta("".join(texts), None, len(token_ids))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text that became certain by some tokens, which is not searched for stop strings."""
        token_bytes, skipped_ids = self._token_bytes, self._skipped_ids
        if len(token_ids) == 1:
            data = b"" if token_ids[0] in skipped_ids else token_bytes[token_ids[0]]
        else:
            data = b"".join([token_bytes[i] for i in token_ids if i not in skipped_ids])
        if not data:
            return ""
        if self._prompt_rest:
            if _continues(self._prompt_rest, data):
                data = self._prompt_rest + data
            self._prompt_rest = b""
        if self._strips_space:
            data = data.removeprefix(b" ")
            self._strips_space = False
        data = self._partial + data
        text, num_decoded = codecs.utf_8_decode(data, "replace", False)
        self._partial = data[num_decoded:]
        return text

    def flush(self) -> str:
        """The rest of the text when no more tokens come: what was held for a stop string, and
        U+FFFD for a character that stayed incomplete."""
        if self._is_stopped:
            return ""
        held = self._matcher.flush()
        rest, self._partial = self._partial.decode("utf-8", "replace"), b""
        return held + rest

    def _partial_character(self, token_ids: Sequence[int]) -> bytes:
        """The bytes at the end of `token_ids` that start a character and do not end it."""
        tail = b""
        for token_id in reversed(token_ids):
            if token_id not in self._skipped_ids:
                tail = self._token_bytes[token_id] + tail
            if len(tail) >= MAX_PARTIAL_BYTES:
                break
        for num_bytes in range(1, MAX_PARTIAL_BYTES + 1):
            if _is_partial_character(tail[-num_bytes:]):
                return tail[-num_bytes:]
        return b""


def _is_partial_character(data: bytes) -> bool:
    """Whether `data` is the start of one character, and not the whole."""
    try:
        _, num_decoded = codecs.utf_8_decode(data, "strict", False)
    except UnicodeDecodeError:
        return False
    return num_decoded == 0 and bool(data)


def _continues(partial: bytes, data: bytes) -> bool:
    """Whether `data` goes on with the character that `partial` starts."""
    try:
        codecs.utf_8_decode(partial + data[:1], "strict", False)
    except UnicodeDecodeError:
        return False
    return True
