"""Finds stop strings in a text that arrives in parts, and holds back what may become one.

    text so far    ...... the answer is\\nUs          stop string "\\nUser:"
                   ------- delivered ---|-- held

Each stop string runs its Knuth-Morris-Pratt automaton over the text, so the cost per character is
constant, and the longest state of all is what must be held. The match that ends first wins,
whatever the parts; of several that end together the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was found; the text before it has been delivered."""

    stop_string: str


class StopStringMatcher:
    """The stop strings of one sequence over its text."""

    def __init__(self, stop_strings: Sequence[str], *, include_match: bool = False) -> None:
        """Stop strings are not empty. With `include_match` the one that is found belongs to the
        text before it."""
        assert all(stop_strings)
        self._include_match = include_match
        self._automata = [_PrefixAutomaton(stop_string) for stop_string in stop_strings]
        self._held = ""

    def append(self, text: str) -> tuple[str, StopMatch | None]:
        """Take more text; give what is certain now, and the match that ends the text if there is
        one. After a match nothing may be appended."""
        if not self._automata:
            return text, None
        buffer = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            matched = [automaton for automaton in self._automata if automaton.advance(char)]
            if matched:
                longest = max(matched, key=lambda automaton: len(automaton.pattern)).pattern
                self._held = ""
                certain = end if self._include_match else end - len(longest)
                return buffer[:certain], StopMatch(longest)
        num_held = max(automaton.state for automaton in self._automata)
        certain = len(buffer) - num_held
        self._held = buffer[certain:]
        return buffer[:certain], None

    def flush(self) -> str:
        """The held text, when nothing more comes."""
        held, self._held = self._held, ""
        return held


class _PrefixAutomaton:
    """`state` is the length of the longest prefix of `pattern` that the text ends with.

    Knuth, Morris, Pratt: Fast pattern matching in strings (1977).
    """

    __slots__ = ("_fallback", "pattern", "state")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.state = 0
        # _fallback[n]: the longest proper prefix of pattern[:n] that is also its suffix
        self._fallback = [0, 0]
        border = 0
        for char in pattern[1:]:
            while border and pattern[border] != char:
                border = self._fallback[border]
            border += pattern[border] == char
            self._fallback.append(border)

    def advance(self, char: str) -> bool:
        """Take one character; whether the text now ends with the pattern."""
        state = self.state
        while state and self.pattern[state] != char:
            state = self._fallback[state]
        self.state = state + (self.pattern[state] == char)
        return self.state == len(self.pattern)
