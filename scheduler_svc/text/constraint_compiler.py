"""From a grammar to a constraint that a sequence can obey."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from scheduler_svc.core.constraint import ConstraintBroken
from scheduler_svc.text.compile_guard import CompileGuard
from scheduler_svc.text.matcher import MatcherConstraint, compile_grammar, make_tokenizer
from scheduler_svc.text.vocabulary import Vocabulary
from shared.errors import InvalidArgument

MAX_CACHED = 32
"""Grammars that are kept compiled: clients mostly send the same few."""


class ConstraintCompiler:
    """Compiles for one vocabulary; for one thread at a time, which it may hold for some seconds."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        token_bytes, special_ids = vocabulary.token_bytes, sorted(vocabulary.special_ids)
        self._vocab_size = len(token_bytes)
        self._tokenizer = make_tokenizer(token_bytes, special_ids)
        self._guard = CompileGuard(token_bytes, special_ids)
        self._cached: OrderedDict[tuple[str, tuple[int, ...]], MatcherConstraint] = OrderedDict()

    def compile(
        self, field: str, grammar: str, eos_token_ids: Collection[int]
    ) -> MatcherConstraint:
        """A constraint that took no token yet; `eos_token_ids` may end a complete text.

        Raises InvalidArgument of `field` for a grammar that is wrong, takes too much time or
        memory, or that no text fulfils but the empty one.
        """
        ends = tuple(sorted(eos_token_ids))
        constraint = self._cached.get((grammar, ends))
        if constraint is None:
            if (reason := self._guard.check(grammar)) is not None:
                raise InvalidArgument(field, reason)
            try:
                constraint = compile_grammar(grammar, self._tokenizer, self._vocab_size, ends)
            except ConstraintBroken as error:
                raise InvalidArgument(field, str(error)) from error
            self._cached[grammar, ends] = constraint
            if len(self._cached) > MAX_CACHED:
                self._cached.popitem(last=False)
        self._cached.move_to_end((grammar, ends))
        return constraint.copy()

    def close(self) -> None:
        """Ends the helper process."""
        self._guard.close()
