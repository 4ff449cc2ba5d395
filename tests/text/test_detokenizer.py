"""A stream's texts joined are its decoding, in whole characters, and nothing of the prompt."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.text.tokenizer import TextModel
from tests.text.corpus import NASTY_TEXTS
from tests.text.tiny_vocabularies import byte_ids, byte_level, sentencepiece

REPLACEMENT = "\ufffd"
TINY = byte_level()


def streamed(model: TextModel, token_ids: list[int], prompt: list[int]) -> list[str]:
    """The delta of each token, and the rest."""
    sequence = model.stream(prompt, [])
    return [*(sequence.append([token_id]).text for token_id in token_ids), sequence.flush()]


@pytest.mark.parametrize("name", NASTY_TEXTS)
def test_real_texts_come_token_by_token(smollm: TextModel, name: str) -> None:
    token_ids = smollm.encode(NASTY_TEXTS[name])
    deltas = streamed(smollm, token_ids, [])
    assert "".join(deltas) == smollm.decode(token_ids, skip_special_tokens=True)
    if REPLACEMENT not in NASTY_TEXTS[name]:
        assert not any(REPLACEMENT in delta for delta in deltas)


def test_a_character_split_over_tokens_comes_whole() -> None:
    """FIELD-FAILURES: a character split over tokens shows U+FFFD."""
    assert streamed(TINY, byte_ids("日"), []) == ["", "", "日", ""]
    assert streamed(TINY, byte_ids("👍"), []) == ["", "", "", "👍", ""]


def test_bytes_that_are_no_utf8_show_only_when_that_is_certain() -> None:
    assert streamed(TINY, byte_ids(b"\xe6\x97A"), []) == ["", "", REPLACEMENT + "A", ""]
    assert streamed(TINY, byte_ids(b"\xe6\x97"), []) == ["", "", REPLACEMENT]
    assert streamed(TINY, byte_ids(b"\xff"), []) == [REPLACEMENT, ""]


def test_special_tokens_are_no_text_and_do_not_break_a_character() -> None:
    first, *rest = byte_ids("é")
    assert streamed(TINY, [0, first, 1, *rest, 2], []) == ["", "", "", "é", "<think>", ""]


def test_a_prompt_that_ends_in_half_a_character_is_no_echo() -> None:
    """FIELD-FAILURES: a prompt that ends in half a character is no echo."""
    half, rest = byte_ids("ab日")[:-1], byte_ids("日")[-1:]
    assert streamed(TINY, [*rest, *byte_ids("c")], half) == ["日", "c", ""]
    assert streamed(TINY, byte_ids("c"), half) == ["c", ""]
    assert streamed(TINY, [], half) == [""]


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_a_character_of_four_bytes_may_be_cut_anywhere(num_bytes: int) -> None:
    ids = byte_ids("👍")
    assert "".join(streamed(TINY, ids[num_bytes:], [0, *ids[:num_bytes], 1])) == "👍"


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.lists(st.integers(0, 259), max_size=24), st.data())
def test_any_ids_in_any_parts_join_to_their_decoding(
    token_ids: list[int], data: st.DataObject
) -> None:
    """FIELD-FAILURES: the joined deltas equal the full decode."""
    sequence = TINY.stream([], [])
    text, rest = "", token_ids
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        delta = sequence.append(rest[:size])
        assert delta.num_tokens_kept == size
        text, rest = text + delta.text, rest[size:]
    assert text + sequence.flush() == TINY.decode(token_ids, skip_special_tokens=True)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.text(max_size=8), st.binary(max_size=8))
def test_after_a_whole_prompt_prompt_and_deltas_join(prompt: str, output: bytes) -> None:
    prompt_ids, output_ids = byte_ids(prompt), byte_ids(output)
    joined = prompt + "".join(streamed(TINY, output_ids, prompt_ids))
    assert joined == TINY.decode([*prompt_ids, *output_ids], skip_special_tokens=True)


def test_random_ids_of_a_real_vocabulary_join_to_their_decoding(smollm: TextModel) -> None:
    draw = random.Random(20)
    for _ in range(50):
        token_ids = [draw.randrange(smollm.vocab_size) for _ in range(40)]
        assert "".join(streamed(smollm, token_ids, [])) == smollm.decode(token_ids, True)


def test_a_space_before_the_text_is_dropped_only_at_its_start() -> None:
    model = sentencepiece()
    token_ids = model.encode("the hello", add_special_tokens=False)
    assert "".join(streamed(model, token_ids, [])) == "the hello" == model.decode(token_ids, True)
    assert "".join(streamed(model, token_ids, [1])) == " the hello"


def test_a_stop_string_over_several_tokens_ends_the_sequence() -> None:
    """FIELD-FAILURES: a stop string over several tokens leaks its start."""
    sequence = TINY.stream([], ["\nEND"])
    assert sequence.append(byte_ids("a\nEN")).text == "a"
    delta = sequence.append(byte_ids("D and on"))
    assert (delta.text, delta.stop_string, delta.num_tokens_kept) == ("", "\nEND", 1)
    assert sequence.flush() == ""


def test_held_text_and_a_character_that_stays_incomplete_come_at_the_end() -> None:
    sequence = TINY.stream([], ["\nEND"])
    assert sequence.append(byte_ids(b"a\nE\xe6")).text == "a"
    assert sequence.flush() == "\nE" + REPLACEMENT


def test_a_stop_string_of_many_bytes_per_character_is_found() -> None:
    sequence = TINY.stream([], ["日本"])
    deltas = [sequence.append([token_id]) for token_id in byte_ids("x日本")]
    assert [delta.text for delta in deltas] == ["x", "", "", "", "", "", ""]
    assert [delta.stop_string for delta in deltas][-2:] == [None, "日本"]


def test_the_cost_of_a_token_does_not_grow_with_the_text() -> None:
    """Held and pending text stays bounded by the stop strings, however long the answer."""
    sequence = TINY.stream([], ["ab" * 20 + "c"])
    for _ in range(300):
        sequence.append(byte_ids("ab"))
    assert len(sequence._matcher._held) == 40
