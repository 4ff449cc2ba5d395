"""What one request may ask for, and the checks that hold it to that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask for; docs/API.md lists them with the sentences here."""

    max_request_id_bytes: int = 128
    """Bytes of `request_id`."""
    max_cache_salt_bytes: int = 128
    """Bytes of `cache_salt`."""
    max_text_bytes: int = 4 << 20
    """Bytes of a text, or of all messages of a conversation."""
    max_token_ids: int = 1 << 20
    """Ids to detokenize in one call."""
    max_chat_messages: int = 4096
    """Messages of a conversation."""
    max_stop_strings: int = 16
    """Stop strings."""
    max_stop_string_bytes: int = 256
    """Bytes of a stop string."""
    max_stop_token_ids: int = 64
    """Stop token ids."""
    max_temperature: float = 100.0
    """Temperature."""
    min_repetition_penalty: float = 0.1
    """Repetition penalties lie in [min_repetition_penalty, max_repetition_penalty]."""
    max_repetition_penalty: float = 10.0
    """Repetition penalties."""
    max_penalty: float = 2.0
    """Presence and frequency penalties lie in [-max_penalty, max_penalty]."""
    max_logit_bias: float = 100.0
    """Biases lie in [-max_logit_bias, max_logit_bias]."""
    max_logit_biases: int = 1024
    """Token ids with a bias."""
    max_listed_token_ids: int = 8192
    """Allowed token ids, and banned ones."""
    max_bad_words: int = 64
    """Bad words."""
    max_bad_word_bytes: int = 128
    """Bytes of a bad word."""
    max_logprobs: int = 32
    """Likeliest tokens told at each place, of output and prompt."""
    max_choices: int = 16
    """Choices, `sampling.n`."""
    max_first_choice: int = 1 << 20
    """Number of the first choice."""
    max_beam_width: int = 16
    """Beams."""
    max_length_penalty: float = 4.0
    """Length penalties lie in [-max_length_penalty, max_length_penalty]."""
    max_constraint_bytes: int = 64 << 10
    """Bytes of a constraint: schema, pattern or grammar, or all options of a choice."""
    max_choice_options: int = 1000
    """Options of `choice`."""
    max_priority: int = 100
    """Priorities lie in [-max_priority, max_priority]."""
    max_detach_ttl_s: int = 3600
    """Seconds for which a detached request can be attached to."""


def check_range(field: str, value: float, lowest: float, highest: float) -> None:
    """Raises InvalidArgument unless `value`, of a whole range, lies within; NaN never does."""
    if not lowest <= value <= highest:
        raise InvalidArgument(field, f"{value:g} is not in [{lowest:g}, {highest:g}]")


def check_share(field: str, value: float) -> None:
    """Raises InvalidArgument unless `value` lies in (0, 1]."""
    if not 0 < value <= 1:
        raise InvalidArgument(field, f"{value:g} is not in (0, 1]")


def check_bytes(field: str, text: str, limit: int) -> None:
    """Raises InvalidArgument for a text of more than `limit` bytes of UTF-8."""
    num_bytes = len(text.encode())
    if num_bytes > limit:
        raise InvalidArgument(field, f"{num_bytes} bytes, the limit is {limit}")


def check_count(field: str, items: Sequence[object], limit: int) -> None:
    """Raises InvalidArgument for more than `limit` items."""
    if len(items) > limit:
        raise InvalidArgument(field, f"{len(items)} entries, the limit is {limit}")


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidArgument for the first id that is not in the vocabulary."""
    if max(token_ids, default=0) < vocab_size:
        return
    for index, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            raise InvalidArgument(f"{field}[{index}]", f"{token_id} is not in [0, {vocab_size})")
