"""Builds a vocabulary from a model folder: tokenizer.json, tokenizer_config.json and, where there
is one, chat_template.jinja."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from scheduler_svc.text.token_bytes import SPACE_PIECE, byte_level_bytes, sentencepiece_bytes
from scheduler_svc.text.vocabulary import Vocabulary
from shared.errors import ModelLoadError

MAX_FILE_BYTES = 256 << 20
_SENTENCEPIECE_STEPS = frozenset({"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})
_TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_folder_vocabulary(folder: Path, vocab_size: int) -> Vocabulary:
    """The vocabulary in a folder; ModelLoadError when it is broken or of an unknown kind."""
    path = folder / "tokenizer.json"
    source = _read(path)
    try:
        encoder = Tokenizer.from_str(source)
    except Exception as error:  # the library raises bare exceptions
        raise ModelLoadError(f"{path}: the tokenizer cannot be used: {error}") from error
    encoder.no_padding()
    encoder.no_truncation()
    to_bytes, strips_leading_space = _decoding(path, json.loads(source).get("decoder"))
    token_bytes = [b""] * vocab_size
    for token, token_id in encoder.get_vocab(with_added_tokens=True).items():
        if token_id >= vocab_size:
            raise ModelLoadError(
                f"{path}: token {token_id} is beyond the model's vocabulary of {vocab_size}"
            )
        token_bytes[token_id] = to_bytes(token)
    config = _read_object(folder / "tokenizer_config.json")
    added = encoder.get_added_tokens_decoder()
    return Vocabulary(
        encoder=encoder,
        token_bytes=token_bytes,
        special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
        strips_leading_space=strips_leading_space,
        chat_template=_chat_template(folder, config),
        template_tokens={
            name: content
            for name in _TEMPLATE_TOKENS
            if (content := _token_content(config.get(name))) is not None
        },
    )


def _decoding(path: Path, decoder: object) -> tuple[Callable[[str], bytes], bool]:
    """How a decoder turns tokens into bytes, and whether it strips a space from a text's start."""
    steps = _steps(decoder)
    kinds = {step.get("type") for step in steps}
    if kinds == {"ByteLevel"}:
        return byte_level_bytes, False
    if not kinds or not kinds <= _SENTENCEPIECE_STEPS:
        raise ModelLoadError(f"{path}: decoder {sorted(map(str, kinds))} is not supported")
    strips = any(
        (step["type"] == "Strip" and step.get("start", 0) > 0)
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )
    for step in steps:
        marks_space = step.get("pattern") == {"String": SPACE_PIECE} and step.get("content") == " "
        if step["type"] == "Replace" and not marks_space:
            raise ModelLoadError(f"{path}: decoder step {step} is not supported")
    return sentencepiece_bytes, strips


def _steps(decoder: object) -> list[Mapping[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [step for item in decoder.get("decoders", ()) for step in _steps(item)]
    return [decoder]


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Of several named templates the default one."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return _read(file)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_content(token: object) -> str | None:
    """A special token in tokenizer_config.json: its text, or an object with it."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _read_object(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file; empty when there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} should hold a JSON object")
    return value


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ModelLoadError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{path} is not UTF-8") from error
