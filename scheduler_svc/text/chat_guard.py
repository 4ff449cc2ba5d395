"""Keeps what messages quote apart from what the chat template says.

A message that spells a special token, such as "<|im_end|>", must reach the model as that text and
not as the token; otherwise whoever writes a message could end its turn and open another's. So the
messages' spellings are broken by a mark before rendering; afterwards the template's own spellings
are the unbroken ones. Those are put in brackets, the marks go, and an encoder whose special tokens
are spelled with the brackets makes the ids:

    message     stop at <|im_end|>
    marked      stop at <·|im_end|>
    rendered    <|im_start|>user stop at <·|im_end|><|im_end|>
    guarded     [<|im_start|>]user stop at <|im_end|>[<|im_end|>]

Mark and brackets are Unicode noncharacters, which are never part of interchanged text (Unicode 15,
section 23.7). Only conversations that spell a special token take this way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer

from shared.errors import InvalidArgument

MARK, OPEN, CLOSE = "\ufdd0", "\ufdd1", "\ufdd2"
_REMOVE_GUARDS = str.maketrans("", "", MARK + OPEN + CLOSE)


class RenderedChat(str):
    """A rendered conversation: as a string what a person reads, with `guarded` for the encoder."""

    guarded: str | None = None
    """The text with brackets around the template's special tokens; None where no message spells
    one, and the string itself tells all."""


class ChatGuard:
    """Marks, guards and encodes conversations for one tokenizer; may be used by several threads."""

    def __init__(self, encoder: Tokenizer) -> None:
        added = encoder.get_added_tokens_decoder()
        self._special = {
            token.content: token_id for token_id, token in added.items() if token.special
        }
        spellings = sorted(self._special, key=len, reverse=True)  # a token before its beginnings
        self._pattern = re.compile("|".join(map(re.escape, spellings)) or "(?!)")
        # The model is shared, not copied; only what is matched before it differs.
        self._encoder = Tokenizer(encoder.model)
        if encoder.normalizer is not None:
            self._encoder.normalizer = encoder.normalizer
        if encoder.pre_tokenizer is not None:
            self._encoder.pre_tokenizer = encoder.pre_tokenizer
        self._ids: dict[int, int] = {}
        """Ids of the guarded encoder's added tokens -> the model's."""
        for token_id, token in sorted(added.items()):
            content = OPEN + token.content + CLOSE if token.special else token.content
            self._encoder.add_tokens([_respelled(token, content)])
            guarded_id = self._encoder.token_to_id(content)
            assert guarded_id is not None
            self._ids[guarded_id] = token_id

    def mark(self, messages: Sequence[tuple[str, str]]) -> list[tuple[str, str]] | None:
        """The messages with marks in the special tokens that they spell; None when they spell
        none."""
        if not any(self._pattern.search(text) for message in messages for text in message):
            return None
        return [(self._marked(role), self._marked(content)) for role, content in messages]

    def guard(self, rendered: str) -> RenderedChat:
        """What a person and what the encoder reads of a text rendered from marked messages."""
        chat = RenderedChat(rendered.translate(_REMOVE_GUARDS))
        chat.guarded = self._pattern.sub(f"{OPEN}\\g<0>{CLOSE}", rendered).replace(MARK, "")
        return chat

    def encode(self, guarded: str) -> list[int]:
        """The ids of a guarded text.

        Raises InvalidArgument when the model makes a special token of ordinary text, which some
        broken vocabularies do.
        """
        (encoding,) = self._encoder.encode_batch_fast([guarded], add_special_tokens=False)
        token_ids = [self._ids.get(token_id, token_id) for token_id in encoding.ids]
        special_ids = set(self._special.values())
        if sum(token_id in special_ids for token_id in token_ids) != guarded.count(OPEN):
            raise InvalidArgument("chat.messages", "they spell special tokens of the model")
        return token_ids

    def _marked(self, text: str) -> str:
        return self._pattern.sub(
            lambda match: match[0][0] + MARK + match[0][1:], text.translate(_REMOVE_GUARDS)
        )


def _respelled(token: AddedToken, content: str) -> AddedToken:
    return AddedToken(
        content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )
