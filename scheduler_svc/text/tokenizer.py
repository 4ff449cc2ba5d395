"""A model's text side: token ids from text, text from token ids, prompts from conversations.

Special tokens in a text, such as "<|im_start|>", are taken for the tokens they spell, as
transformers does: who sends a plain prompt owns all of it and might as well send the ids. In a
conversation they are tokens where the chat template says them, and text where a message does.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_svc.text.chat_guard import ChatGuard, RenderedChat
from scheduler_svc.text.chat_template import ChatTemplate
from scheduler_svc.text.detokenizer import SequenceText
from scheduler_svc.text.folder_vocabulary import read_folder_vocabulary
from scheduler_svc.text.gguf_vocabulary import read_gguf_vocabulary
from scheduler_svc.text.token_bytes import join_text
from scheduler_svc.text.vocabulary import Vocabulary
from shared.errors import InvalidArgument
from shared.model_spec import ModelSpec


class TextModel:
    """The text side of one model; may be used from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Raises ModelLoadError when the chat template does not compile."""
        self._vocabulary = vocabulary
        self._guard = ChatGuard(vocabulary.encoder)
        self._template = (
            None
            if vocabulary.chat_template is None
            else ChatTemplate(vocabulary.chat_template, vocabulary.template_tokens)
        )

    @classmethod
    def load(cls, spec: ModelSpec) -> TextModel:
        """Build it from the model's files. Raises ModelLoadError when they can't be used."""
        read = read_gguf_vocabulary if spec.file_format == "gguf" else read_folder_vocabulary
        return cls(read(spec.path, spec.vocab_size))

    @property
    def vocab_size(self) -> int:
        """Number of token ids, with those that stand for nothing."""
        return len(self._vocabulary.token_bytes)

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def is_valid_token(self, token_id: int) -> bool:
        """Whether the model has this id."""
        return 0 <= token_id < self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, with those that the model expects around it, such as BOS, if asked.

        Raises InvalidArgument when the text is no Unicode (holds half of a surrogate pair).
        """
        _require_unicode(text)
        # The batch call lets other threads run meanwhile; the plain one does not.
        (encoding,) = self._vocabulary.encoder.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return list(encoding.ids)

    def bad_word_ids(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """The token sequences that spell each of `words`, as it is and after a space; each once.

        Raises InvalidArgument as encode does.
        """
        _require_unicode("".join(words))
        texts = [text for word in words for text in (word, " " + word)]
        encodings = self._vocabulary.encoder.encode_batch_fast(texts, add_special_tokens=False)
        return list(dict.fromkeys(tuple(found.ids) for found in encodings if found.ids))

    def encode_rendered(self, text: str) -> list[int]:
        """The ids of a conversation as render_chat gave it; nothing is added around it, for the
        template has put BOS and the like in already.

        Raises InvalidArgument as encode does.
        """
        if isinstance(text, RenderedChat) and text.guarded is not None:
            _require_unicode(text)
            return self._guard.encode(text.guarded)
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of ids; bytes that are no UTF-8 show as U+FFFD.

        Raises InvalidArgument for an id that the model does not have.
        """
        skipped = self._vocabulary.special_ids if skip_special_tokens else frozenset()
        for token_id in token_ids:
            if not self.is_valid_token(token_id):
                raise InvalidArgument(
                    "token_ids", f"{token_id} is not below the vocabulary size {self.vocab_size}"
                )
        text = join_text(
            self._vocabulary.token_bytes[token_id]
            for token_id in token_ids
            if token_id not in skipped
        )
        return text.removeprefix(" ") if self._vocabulary.strips_leading_space else text

    def render_chat(self, messages: Sequence[tuple[str, str]]) -> RenderedChat:
        """The prompt for the next answer to `messages`, pairs of role and content, oldest first.

        Raises InvalidArgument for an empty list, without a chat template, and for messages that the
        template refuses.
        """
        if self._template is None:
            raise InvalidArgument("chat", "the model has no chat template")
        marked = self._guard.mark(messages)
        if marked is None:
            return RenderedChat(self._template.render(messages))
        return self._guard.guard(self._template.render(marked))

    def stream(
        self,
        prompt_token_ids: Sequence[int],
        stop_strings: Sequence[str],
        *,
        include_stop_string: bool = False,
        min_tokens: int = 0,
    ) -> SequenceText:
        """A decoder for the sequence that follows a prompt; special tokens are no text. See
        SequenceText for the options."""
        return SequenceText(
            self._vocabulary.token_bytes,
            self._vocabulary.special_ids,
            prompt_token_ids,
            stop_strings,
            self._vocabulary.strips_leading_space,
            include_stop_string=include_stop_string,
            min_tokens=min_tokens,
        )


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            "text", "it holds half of a surrogate pair, which is no character"
        ) from error
