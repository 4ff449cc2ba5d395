"""A model's vocabulary, whichever files it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How a model turns text into ids and back."""

    encoder: Tokenizer
    """Splits text into ids; safe to use from several threads."""
    token_bytes: Sequence[bytes]
    """By id, for every id of the model; empty for ids that stand for nothing."""
    special_ids: frozenset[int]
    """Tokens that steer the model and are no text."""
    strips_leading_space: bool
    """Whether encoding puts a space before a text, which decoding from its start removes."""
    chat_template: str | None
    """Jinja source."""
    template_tokens: Mapping[str, str]
    """bos_token, eos_token and the like, as chat templates name them."""
