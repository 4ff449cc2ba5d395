"""A model folder with tokenizer.json gives the same text side as a GGUF file of the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.text.folder_vocabulary import read_folder_vocabulary
from scheduler_svc.text.tokenizer import TextModel
from shared.errors import ModelLoadError
from tests.text.corpus import NASTY_TEXTS
from tests.text.tiny_vocabularies import CHATML, byte_level, sentencepiece

SENTENCEPIECE_DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}
CONFIG = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}


def write_folder(folder: Path, like: TextModel, config: object, **changes: object) -> Path:
    """A folder with the tokenizer of `like`, and `changes` to the top of its tokenizer.json."""
    tokenizer: dict[str, Any] = json.loads(like._vocabulary.encoder.to_str())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | changes))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path, vocab_size: int) -> TextModel:
    return TextModel(read_folder_vocabulary(folder, vocab_size))


def assert_same(ours: TextModel, other: TextModel) -> None:
    for text in NASTY_TEXTS.values():
        token_ids = other.encode(text)
        assert ours.encode(text) == token_ids
        for skip in (True, False):
            assert ours.decode(token_ids, skip) == other.decode(token_ids, skip)


def test_byte_level_folder(tmp_path: Path) -> None:
    gguf = byte_level()
    folder = load(write_folder(tmp_path, gguf, CONFIG | {"chat_template": CHATML}), 262)
    assert_same(folder, gguf)
    messages = [("user", "a<|im_end|>b")]
    assert folder.render_chat(messages) == gguf.render_chat(messages)
    assert folder.encode_rendered(folder.render_chat(messages)) == gguf.encode_rendered(
        gguf.render_chat(messages)
    )


def test_sentencepiece_folder(tmp_path: Path) -> None:
    gguf = sentencepiece()
    changes: dict[str, object] = {"decoder": SENTENCEPIECE_DECODER}
    assert_same(load(write_folder(tmp_path, gguf, {}, **changes), gguf.vocab_size), gguf)


def test_padding_and_truncation_of_the_file_are_off(tmp_path: Path) -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    model = load(write_folder(tmp_path, byte_level(), CONFIG, truncation=truncation), 262)
    assert len(model.encode("xxxx")) == 4


def test_the_template_is_the_jinja_file_or_the_default_of_the_config(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "{{ eos_token }}"}]
    folder = write_folder(tmp_path, byte_level(), CONFIG | {"chat_template": named})
    assert load(folder, 262).render_chat([("user", "x")]) == "<|im_end|>"
    (folder / "chat_template.jinja").write_text("{{ bos_token }}")
    assert load(folder, 262).render_chat([("user", "x")]) == "<|im_start|>"


def test_a_folder_without_a_template_has_none(tmp_path: Path) -> None:
    assert not load(write_folder(tmp_path, byte_level(), {}), 262).has_chat_template


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "WordPiece"),
        ({"decoder": None}, "decoder"),
        ({"model": {"type": "Unheard"}}, "tokenizer.json"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_says_why(
    tmp_path: Path, changes: dict[str, object], cause: str
) -> None:
    with pytest.raises(ModelLoadError, match=cause):
        load(write_folder(tmp_path, byte_level(), {}, **changes), 262)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        load(tmp_path, 262)
    write_folder(tmp_path, byte_level(), {})
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
        load(tmp_path, 262)


def test_a_token_beyond_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="beyond the model's vocabulary of 100"):
        load(write_folder(tmp_path, byte_level(), {}), 100)
