"""Ids are those of transformers; texts come back; special tokens are where they belong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.text.gguf_vocabulary import vocabulary_of_metadata
from scheduler_svc.text.tokenizer import TextModel
from shared.errors import InvalidArgument, ModelLoadError
from shared.gguf_file import GgufFile
from tests.text.corpus import NASTY_TEXTS
from tests.text.make_expected_ids import EXPECTED_FILE
from tests.text.tiny_vocabularies import (
    byte_ids,
    byte_level,
    byte_level_metadata,
    sentencepiece,
)

EXPECTED: dict[str, dict[str, list[int]]] = json.loads(EXPECTED_FILE.read_text())


@pytest.mark.parametrize("name", NASTY_TEXTS)
def test_ids_equal_those_of_transformers(smollm: TextModel, name: str) -> None:
    assert smollm.encode(NASTY_TEXTS[name]) == EXPECTED["smollm"][name]


@pytest.mark.parametrize("style", ["gpt-2", "llama-bpe", "qwen2", "tekken"])
def test_each_family_cuts_as_transformers_does(gguf: GgufFile, style: str) -> None:
    metadata = {**gguf.metadata, "tokenizer.ggml.pre": style, "tokenizer.ggml.add_bos_token": False}
    model = TextModel(vocabulary_of_metadata(gguf.path, metadata, 49152))
    assert {name: model.encode(text) for name, text in NASTY_TEXTS.items()} == EXPECTED[style]


@pytest.mark.parametrize("name", NASTY_TEXTS)
def test_sentencepiece_ids_equal_those_of_transformers(name: str) -> None:
    assert sentencepiece().encode(NASTY_TEXTS[name]) == EXPECTED["sentencepiece"][name]


@pytest.mark.parametrize("name", NASTY_TEXTS)
def test_texts_come_back(smollm: TextModel, name: str) -> None:
    text = NASTY_TEXTS[name]
    assert smollm.decode(smollm.encode(text), skip_special_tokens=False) == text


@settings(deadline=None, derandomize=True)
@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    model = byte_level()
    assert model.decode(model.encode(text), skip_special_tokens=False) == text


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2**16), max_size=40))
def test_any_ids_decode_as_their_library_does(smollm: TextModel, words: list[int]) -> None:
    token_ids = [word % smollm.vocab_size for word in words]
    library = smollm._vocabulary.encoder
    for skip in (True, False):
        assert smollm.decode(token_ids, skip) == library.decode(token_ids, skip)


def test_special_tokens_in_a_text_are_tokens_and_are_skipped_on_demand() -> None:
    model = byte_level()
    token_ids = model.encode("a<|im_end|>b<think>")
    assert token_ids == [*byte_ids("a"), 1, *byte_ids("b"), 2]
    assert model.decode(token_ids, skip_special_tokens=True) == "ab<think>"
    assert model.decode(token_ids, skip_special_tokens=False) == "a<|im_end|>b<think>"


def test_bos_and_eos_are_added_where_the_file_says_so() -> None:
    model = byte_level(ggml__add_bos_token=True, ggml__add_eos_token=True)
    assert model.encode("x") == [0, *byte_ids("x"), 1]
    assert model.encode("x", add_special_tokens=False) == byte_ids("x")
    assert model.encode_rendered("x") == byte_ids("x")
    assert byte_level().encode("x") == byte_ids("x")


def test_families_that_start_with_bos_do_so_without_a_word_in_the_file() -> None:
    assert byte_level(ggml__pre="llama-bpe").encode("x") == [0, *byte_ids("x")]
    assert byte_level(ggml__pre="llama-bpe", ggml__add_bos_token=False).encode("x") == byte_ids("x")


def test_a_space_prefix_is_added_and_taken_away_where_the_file_says_so() -> None:
    with_prefix, without = sentencepiece(), sentencepiece(ggml__add_space_prefix=False)
    ids = with_prefix.encode("the", add_special_tokens=False)
    assert with_prefix.decode(ids, False) == "the"
    assert without.decode(ids, False) == " the"
    assert without.encode("the", add_special_tokens=False) != ids


def test_half_of_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidArgument) as refused:
        byte_level().encode("a\ud800b")
    assert refused.value.field == "text"


@pytest.mark.parametrize("token_id", [-1, 262, 2**32 - 1])
def test_ids_out_of_range_are_refused(token_id: int) -> None:
    """FIELD-FAILURES: token ids -1, vocab size, 2^32-1."""
    model = byte_level()
    assert model.vocab_size == 262
    assert not model.is_valid_token(token_id)
    assert model.is_valid_token(261)
    with pytest.raises(InvalidArgument):
        model.decode([token_id], skip_special_tokens=False)


def test_ids_without_a_token_are_no_text() -> None:
    assert byte_level().decode([*byte_ids("a"), 261], skip_special_tokens=False) == "a"


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"ggml__model": "bert"}, "'bert'"),
        ({"ggml__pre": "unheard-of"}, "'unheard-of'"),
        ({"ggml__merges": ["ab"]}, "'ab' is no merge"),
        ({"ggml__merges": ["a zz"]}, "zz"),
        ({"ggml__merges": None}, "no merges"),
        ({"ggml__token_type": np.array([1])}, "token_type"),
        ({"ggml__bos_token_id": 9999}, "9999"),
        ({"chat_template": "{% for %}"}, "chat template"),
    ],
)
def test_a_vocabulary_that_cannot_be_used_says_why(changes: dict[str, object], cause: str) -> None:
    with pytest.raises(ModelLoadError, match=cause):
        byte_level(**changes)


def test_more_tokens_than_the_model_has_are_refused() -> None:
    metadata = {f"tokenizer.{key}": value for key, value in byte_level_metadata().items()}
    with pytest.raises(ModelLoadError, match="260 tokens for a vocabulary of 259"):
        vocabulary_of_metadata(Path("tiny.gguf"), metadata, 259)
