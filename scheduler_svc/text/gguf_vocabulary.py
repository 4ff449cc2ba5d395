"""Builds a vocabulary from a GGUF file's metadata.

The file names the algorithm (tokenizer.ggml.model) and, for byte-level BPE, the way text is cut
before merging (tokenizer.ggml.pre). The cuts are those of the tokenizer.json that each model family
publishes; llama.cpp's src/llama-vocab.cpp has them by the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from scheduler_svc.text.token_bytes import SPACE_PIECE, byte_level_bytes, sentencepiece_bytes
from scheduler_svc.text.vocabulary import Vocabulary
from shared.errors import ModelLoadError
from shared.gguf_file import GgufFile, StringArray

# tokenizer.ggml.token_type
CONTROL, USER_DEFINED = 3, 4

_LLAMA3_CUTS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_CUTS = _LLAMA3_CUTS.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_CUTS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _ByteLevelStyle:
    """What distinguishes the families of byte-level BPE."""

    cuts: str | None = None
    """A regular expression of the pieces; None for GPT-2's own."""
    splits_digits: bool = False
    """Whether each digit is a piece before anything else."""
    takes_whole_pieces: bool = False
    """Whether a piece that is a token is taken as it is, without merging up to it."""
    composes: bool = False
    """Whether text is brought to Unicode NFC first."""
    adds_bos: bool = False
    """Whether a text starts with BOS where the file doesn't say."""


_GPT2 = _ByteLevelStyle()
_SMOLLM = _ByteLevelStyle(splits_digits=True)
_LLAMA3 = _ByteLevelStyle(_LLAMA3_CUTS, takes_whole_pieces=True, adds_bos=True)
_QWEN2 = _ByteLevelStyle(_QWEN2_CUTS, composes=True)
_TEKKEN = _ByteLevelStyle(_TEKKEN_CUTS, takes_whole_pieces=True, adds_bos=True)
BYTE_LEVEL_STYLES: Mapping[str, _ByteLevelStyle] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}


def read_gguf_vocabulary(path: Path, vocab_size: int) -> Vocabulary:
    """The vocabulary in a GGUF file; ModelLoadError when it is broken or of an unknown kind."""
    return vocabulary_of_metadata(path, GgufFile.open(path).metadata, vocab_size)


def vocabulary_of_metadata(
    path: Path, metadata: Mapping[str, object], vocab_size: int
) -> Vocabulary:
    """The same from metadata that is read already; `path` is for the errors."""
    return _GgufVocabulary(path, metadata).build(vocab_size)


class _GgufVocabulary:
    """The tokenizer.ggml.* metadata of one file."""

    def __init__(self, path: Path, metadata: Mapping[str, object]) -> None:
        self.path = path
        self.metadata = metadata
        self.tokens = self._strings("tokens")
        self.types: list[int] = self._array("token_type", len(self.tokens))
        self.model = metadata.get("tokenizer.ggml.model")

    def build(self, vocab_size: int) -> Vocabulary:
        if len(self.tokens) > vocab_size:
            raise self._broken(f"{len(self.tokens)} tokens for a vocabulary of {vocab_size}")
        try:
            if self.model == "gpt2":
                encoder, adds_bos = self._byte_level()
                to_bytes, strips_leading_space = byte_level_bytes, False
            elif self.model == "llama":
                strips_leading_space = self._flag("add_space_prefix", True)
                encoder, adds_bos = self._sentencepiece(strips_leading_space), True
                to_bytes = sentencepiece_bytes
            else:
                raise self._broken(f"tokenizer {self.model!r} is not supported")
            special_ids = self._special_ids()
            self._add_tokens(encoder, special_ids)
            self._add_affixes(encoder, adds_bos)
        except ModelLoadError:
            raise
        except Exception as error:  # the library raises bare exceptions
            raise self._broken(str(error)) from error
        token_bytes = [to_bytes(token) for token in self.tokens]
        token_bytes += [b""] * (vocab_size - len(token_bytes))
        template = self.metadata.get("tokenizer.chat_template")
        return Vocabulary(
            encoder=encoder,
            token_bytes=token_bytes,
            special_ids=special_ids,
            strips_leading_space=strips_leading_space,
            chat_template=template if isinstance(template, str) else None,
            template_tokens={
                f"{name}_token": self.tokens[token_id]
                for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"))
                if (token_id := self._token_id(key)) is not None
            },
        )

    def _byte_level(self) -> tuple[Tokenizer, bool]:
        """Byte-level BPE, and whether its family starts a text with BOS."""
        name = self.metadata.get("tokenizer.ggml.pre", "default")
        style = BYTE_LEVEL_STYLES.get(name) if isinstance(name, str) else None
        if style is None:
            raise self._broken(f"pre-tokenizer {name!r} is not supported")
        encoder = Tokenizer(
            models.BPE(
                vocab=self._ids_by_token(),
                merges=[self._merge(line) for line in self._strings("merges")],
                ignore_merges=style.takes_whole_pieces,
            )
        )
        cuts: list[pre_tokenizers.PreTokenizer] = []
        if style.splits_digits:
            cuts.append(pre_tokenizers.Digits(individual_digits=True))
        if style.cuts is not None:
            cuts.append(pre_tokenizers.Split(Regex(style.cuts), behavior="isolated"))
        cuts.append(
            pre_tokenizers.ByteLevel(
                add_prefix_space=self._flag("add_space_prefix", False),
                use_regex=style.cuts is None,
            )
        )
        encoder.pre_tokenizer = pre_tokenizers.Sequence(cuts)
        encoder.decoder = decoders.ByteLevel()
        if style.composes:
            encoder.normalizer = normalizers.NFC()
        return encoder, style.adds_bos

    def _sentencepiece(self, adds_leading_space: bool) -> Tokenizer:
        """SentencePiece's BPE with byte fallback. The files carry a score for each token instead of
        merges; merging by falling score is the same."""
        unknown = self._token_id("unknown")
        encoder = Tokenizer(
            models.BPE(
                vocab=self._ids_by_token(),
                merges=self._merges_by_score(),
                unk_token=None if unknown is None else self.tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        encoder.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=SPACE_PIECE,
            prepend_scheme="first" if adds_leading_space else "never",
            split=False,
        )
        return encoder

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """Every way to make a token of two, best score first, then longest left part first.

        Special tokens are left out: no text may become one by merging.
        """
        special_ids = self._special_ids()
        scores = self._array("scores", len(self.tokens))
        known = self._ids_by_token()
        ranked = [
            (-score, -cut, cut - len(token), token[:cut], token[cut:])
            for token_id, (token, score) in enumerate(zip(self.tokens, scores, strict=True))
            if token_id not in special_ids
            for cut in range(1, len(token))
            if token[:cut] in known and token[cut:] in known
        ]
        ranked.sort(key=lambda merge: merge[:3])  # stable: then by id
        return [(left, right) for *_, left, right in ranked]

    def _add_tokens(self, encoder: Tokenizer, special_ids: Iterable[int]) -> None:
        """Tokens that are matched whole in a text, before it is cut."""
        encoder.add_special_tokens(
            [
                AddedToken(self.tokens[token_id], normalized=False, special=True)
                for token_id in sorted(special_ids)
            ]
        )
        encoder.add_tokens(
            [
                AddedToken(token, normalized=False)
                for token, kind in zip(self.tokens, self.types, strict=True)
                if kind == USER_DEFINED
            ]
        )

    def _add_affixes(self, encoder: Tokenizer, adds_bos: bool) -> None:
        """BOS and EOS around a text, where the file or its family wants them."""
        bos = self._token_id("bos") if self._flag("add_bos_token", adds_bos) else None
        eos = self._token_id("eos") if self._flag("add_eos_token", False) else None
        affixes = {
            self.tokens[token_id]: token_id for token_id in (bos, eos) if token_id is not None
        }
        if not affixes:
            return
        encoder.post_processor = processors.TemplateProcessing(
            single=[
                *([] if bos is None else [self.tokens[bos]]),
                "$A",
                *([] if eos is None else [self.tokens[eos]]),
            ],
            special_tokens=list(affixes.items()),
        )

    def _special_ids(self) -> frozenset[int]:
        named = (
            self._token_id(name) for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
        )
        control = (index for index, kind in enumerate(self.types) if kind == CONTROL)
        return frozenset([*control, *(token_id for token_id in named if token_id is not None)])

    def _ids_by_token(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    def _merge(self, line: str) -> tuple[str, str]:
        left, space, right = line.partition(" ")
        if not (left and space and right):
            raise self._broken(f"{line!r} is no merge")
        return left, right

    def _token_id(self, name: str) -> int | None:
        token_id = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is None:
            return None
        if not isinstance(token_id, int) or not 0 <= token_id < len(self.tokens):
            raise self._broken(f"{name}_token_id {token_id!r} is no token")
        return token_id

    def _flag(self, name: str, default: bool) -> bool:
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise self._broken(f"{name} should be true or false, is {value!r}")
        return value

    def _strings(self, name: str) -> list[str]:
        value = self.metadata.get(f"tokenizer.ggml.{name}")
        if isinstance(value, StringArray):
            value = value.decode()
        if not isinstance(value, list) or not value:
            raise self._broken(f"it has no {name}")
        return value

    def _array(self, name: str, length: int) -> list[Any]:
        """A numeric array as a list of Python numbers."""
        value = self.metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, np.ndarray) or len(value) != length:
            raise self._broken(f"it has no {name} for each token")
        return list(value.tolist())

    def _broken(self, cause: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: the tokenizer cannot be used: {cause}")
