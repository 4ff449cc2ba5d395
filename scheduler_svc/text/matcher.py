"""A grammar at work on one sequence: llguidance's matcher as the core's TokenConstraint.

The matcher knows one token more than the model has: the end of the text, which its mask allows
where the text is complete. There the request's own end-of-sequence tokens are allowed instead; and
where nothing else is, the text is complete without them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from scheduler_svc.core.constraint import ConstraintBroken
from shared.plan import TokenMask

Bytes = npt.NDArray[np.uint8]

MAX_REASON_CHARS = 300
DEAD_END = "no text fulfils it"
_WRAPPER_PLACE = "at 1(8): "
"""Where `scheduler_svc.text.grammar` puts a schema or a pattern."""
BYTES_PER_ID = 3
"""What an id takes in a plan; vocabularies stay below 2^21."""


def parser_limits() -> LLParserLimits:
    """What a grammar may cost. Masks are made in the event loop: with 49,152 tokens, taking a token
    and making the next mask takes 80 us in the median, 0.6 ms in a free string; the limits of a
    step stand near 5 ms."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,  # 20 ms of a regular expression's first analysis
        step_lexer_fuel=50_000,  # 4 ms
        step_max_items=20_000,  # 1 ms
        max_lexer_states=20_000,  # 1 to 2 kB each
        max_grammar_size=100_000,  # symbols
        verbose_errors=False,
    )


def make_tokenizer(token_bytes: Sequence[bytes], special_ids: Sequence[int]) -> LLTokenizer:
    """llguidance's view of a vocabulary, with the end of the text as an id after all others."""
    return LLTokenizer(
        TokenizerWrapper(_Tokens(token_bytes, special_ids)),
        slices=LLTokenizer.json_slices(),
    )


def compile_grammar(
    grammar: str, tokenizer: LLTokenizer, vocab_size: int, eos_token_ids: Sequence[int]
) -> MatcherConstraint:
    """A constraint for the tokens of `vocab_size` ids, of which `eos_token_ids` may end a complete
    text. Raises ConstraintBroken for a grammar that is wrong, costs too much, or that no text
    fulfils but the empty one."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    return MatcherConstraint(matcher, vocab_size, eos_token_ids)


class _Tokens:
    """What TokenizerWrapper reads."""

    bos_token_id = None

    def __init__(self, token_bytes: Sequence[bytes], special_ids: Sequence[int]) -> None:
        self.eos_token_id = len(token_bytes)
        self.tokens = [*token_bytes, b"<|end of text|>"]
        self.special_token_ids = [*special_ids, self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        """Never needed, as grammars force nothing; the wrapper tries it once."""
        return []


class MatcherConstraint:
    """One sequence's state; see TokenConstraint."""

    __slots__ = ("_eos_token_ids", "_mask", "_matcher", "_vocab_size")

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """See compile_grammar; the matcher took no token yet."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._mask: TokenMask | None = None
        if not self._advance():
            raise ConstraintBroken("no text fulfils it but the empty one")

    @property
    def mask(self) -> TokenMask | None:
        return self._mask

    def accept(self, token_id: int) -> bool:
        if not self._matcher.consume_token(token_id):
            raise self._broken()
        return self._advance()

    def copy(self) -> MatcherConstraint:
        same = MatcherConstraint.__new__(MatcherConstraint)
        same._matcher = self._matcher.deep_copy()
        same._vocab_size = self._vocab_size
        same._eos_token_ids = self._eos_token_ids
        same._mask = self._mask
        return same

    def _advance(self) -> bool:
        """Make the next mask; False when the text is complete and nothing can follow."""
        if not self._matcher.is_stopped():
            packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise self._broken()
        if self._matcher.is_stopped():
            if self._matcher.is_accepting():
                return False
            raise ConstraintBroken(DEAD_END)
        return self._set_mask(packed)

    def _set_mask(self, packed: Bytes) -> bool:
        """`packed` has the end of the text as its last bit."""
        end = self._vocab_size
        is_complete = bool(packed[end // 8] >> end % 8 & 1)
        bits = packed[: -(-end // 8)].copy()
        if end % 8:
            bits[-1] &= (1 << end % 8) - 1
        if not bits.any():
            if is_complete:
                return False
            raise ConstraintBroken(DEAD_END)
        if is_complete:
            for token_id in self._eos_token_ids:
                bits[token_id // 8] |= 1 << token_id % 8
        self._mask = _smaller_form(bits)
        return True

    def _broken(self) -> ConstraintBroken:
        return ConstraintBroken(_reason(self._matcher.get_error()))


def _smaller_form(bits: Bytes) -> TokenMask:
    """The mask whose `bits` [ceil(vocab_size / 8)] are not all 0."""
    places = bits.nonzero()[0]
    if len(places) * BYTES_PER_ID < len(bits):
        number = np.unpackbits(bits[places], bitorder="little").nonzero()[0]
        if len(number) * BYTES_PER_ID < len(bits):
            return TokenMask(token_ids=(8 * places[number >> 3] + (number & 7)).tolist())
    return TokenMask(bits=bits.tobytes())


def _reason(error: str) -> str:
    """What a client needs to know of llguidance's error: not the excerpt of a grammar, which may be
    long and isn't always the client's own."""
    lines = error.splitlines()
    if "NoExtensionBias" in lines:
        return DEAD_END
    # An error of a pattern comes last, after the pattern.
    said = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "")
    said = said.removeprefix("error: ").removeprefix(_WRAPPER_PLACE)
    return said[:MAX_REASON_CHARS] or "the text breaks it"
