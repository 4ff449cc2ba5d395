"""A stop string never leaks its start, a near miss is whole, and parts do not matter."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.text.stop_strings import StopMatch, StopStringMatcher


def run(parts: list[str], stop_strings: list[str]) -> tuple[list[str], str | None]:
    """The texts delivered for each part and at the end, and the stop string found."""
    matcher = StopStringMatcher(stop_strings)
    delivered = []
    for part in parts:
        text, match = matcher.append(part)
        delivered.append(text)
        if match is not None:
            return delivered, match.stop_string
    return [*delivered, matcher.flush()], None


def test_a_stop_string_over_several_parts_does_not_leak_its_start() -> None:
    """FIELD-FAILURES: a stop string over several tokens leaks its start."""
    assert run(["an answer\n", "Us", "er", ": and"], ["\nUser:"]) == (
        ["an answer", "", "", ""],
        "\nUser:",
    )


def test_a_near_miss_is_delivered_whole() -> None:
    """FIELD-FAILURES: a near miss is delivered whole."""
    assert run(["a\nUs", "ed", "!"], ["\nUser:"]) == (["a", "\nUsed", "!", ""], None)


def test_held_text_is_flushed_at_the_end() -> None:
    """FIELD-FAILURES: the held text is flushed at the end."""
    assert run(["so\nUser"], ["\nUser:"]) == (["so", "\nUser"], None)


def test_a_miss_may_be_the_start_of_a_match() -> None:
    assert run(list("aabaabaaac"), ["aabaaa"])[1] == "aabaaa"
    assert "".join(run(list("aabaabaaac"), ["aabaaa"])[0]) == "aab"


@pytest.mark.parametrize(
    ("text", "stop_strings", "expected"),
    [
        ("one STOP two END", ["END", "STOP"], ("one ", "STOP")),
        ("xabcd", ["abcd", "bc"], ("xa", "bc")),  # ends first
        ("xabc", ["bc", "abc", "c"], ("x", "abc")),  # of those that end together the longest
    ],
)
def test_the_match_that_ends_first_wins(
    text: str, stop_strings: list[str], expected: tuple[str, str]
) -> None:
    for parts in ([text], list(text)):
        delivered, found = run(parts, stop_strings)
        assert ("".join(delivered), found) == expected


def test_without_stop_strings_nothing_is_held() -> None:
    assert StopStringMatcher([]).append("anything") == ("anything", None)


def expected_by_search(text: str, stop_strings: list[str]) -> tuple[str, StopMatch | None]:
    """The rule by plain search."""
    ends = [
        (start + len(stop_string), -len(stop_string), stop_string)
        for stop_string in stop_strings
        if (start := text.find(stop_string)) >= 0
    ]
    if not ends:
        return text, None
    end, _, stop_string = min(ends)
    return text[: end - len(stop_string)], StopMatch(stop_string)


letters = st.text("ab", max_size=12)


@settings(deadline=None, derandomize=True, max_examples=500)
@given(st.lists(letters, max_size=6), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_it_is_plain_search_whatever_the_parts(parts: list[str], stop_strings: list[str]) -> None:
    delivered, found = run(parts, stop_strings)
    text, match = expected_by_search("".join(parts), stop_strings)
    assert "".join(delivered) == text
    assert found == (match and match.stop_string)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.lists(letters, max_size=6), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1))
def test_no_more_is_held_than_a_stop_string_may_need(
    parts: list[str], stop_strings: list[str]
) -> None:
    matcher = StopStringMatcher(stop_strings)
    text, delivered = "", ""
    for part in parts:
        certain, match = matcher.append(part)
        if match is not None:
            return
        text, delivered = text + part, delivered + certain
        held = text[len(delivered) :]
        assert not held or any(stop_string.startswith(held) for stop_string in stop_strings)
