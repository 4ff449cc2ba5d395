"""Small vocabularies as GGUF metadata, built in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from scheduler_svc.text.gguf_vocabulary import vocabulary_of_metadata
from scheduler_svc.text.token_bytes import BYTE_ALPHABET
from scheduler_svc.text.tokenizer import TextModel
from tests.text.corpus import sentencepiece_vocabulary

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def text_model(metadata: dict[str, object]) -> TextModel:
    """The text side of metadata whose keys lack `tokenizer.`; two ids stand for nothing."""
    full = {f"tokenizer.{key}": value for key, value in metadata.items()}
    tokens = metadata["ggml.tokens"]
    assert isinstance(tokens, list)
    return TextModel(vocabulary_of_metadata(Path("tiny.gguf"), full, len(tokens) + 2))


def byte_level_metadata(**changes: object) -> dict[str, object]:
    """Two control tokens, one user-defined token and the 256 bytes; ids of bytes are byte + 3."""
    letters = {byte: letter for letter, byte in BYTE_ALPHABET.items()}
    tokens = ["<|im_start|>", "<|im_end|>", "<think>", *(letters[byte] for byte in range(256))]
    tokens.append(letters[ord("a")] + letters[ord("b")])
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "gpt-2",
        "ggml.tokens": tokens,
        "ggml.token_type": np.array([3, 3, 4, *[1] * 257]),
        "ggml.merges": ["a b"],
        "ggml.bos_token_id": 0,
        "ggml.eos_token_id": 1,
        "chat_template": CHATML,
    } | {key.replace("__", "."): value for key, value in changes.items()}


def byte_level(**changes: object) -> TextModel:
    return text_model(byte_level_metadata(**changes))


def sentencepiece(**changes: object) -> TextModel:
    tokens, scores, types = sentencepiece_vocabulary()
    metadata: dict[str, object] = {
        "ggml.model": "llama",
        "ggml.tokens": tokens,
        "ggml.scores": np.array(scores),
        "ggml.token_type": np.array(types),
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
        "chat_template": "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]"
        "{% endfor %}",
    }
    return text_model(metadata | {key.replace("__", "."): value for key, value in changes.items()})


def byte_ids(text: str | bytes) -> list[int]:
    """Ids of single bytes in the byte-level vocabulary."""
    data = text.encode() if isinstance(text, str) else text
    return [byte + 3 for byte in data]
