"""From a grammar to a constraint that a sequence can obey."""

from __future__ import annotations

from collections.abc import Collection
from queue import LifoQueue

from scheduler_svc.core.constraint import ConstraintBroken
from scheduler_svc.text.compile_guard import CompileGuard, OutOfTime, TooCostly
from scheduler_svc.text.matcher import MatcherConstraint, compile_grammar, make_tokenizer
from scheduler_svc.text.vocabulary import Vocabulary
from shared.errors import InvalidArgument

QUICK_CPU_S = 0.01
"""Five times what most schemas take."""
MAX_CPU_S = 0.1
"""Processor time that a grammar may take. An object of 300 properties takes 0.015 s."""
NUM_COSTLY = 2
"""Grammars of more than QUICK_CPU_S that are compiled at once."""
TOO_COSTLY = "compiling it takes too much time or memory"
COSTLY_NICENESS = 5
"""They stand back for the others, and for the streams."""


class ConstraintCompiler:
    """Compiles for one vocabulary; for threads: one that compiles quickly, NUM_COSTLY others."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        token_bytes, special_ids = vocabulary.token_bytes, sorted(vocabulary.special_ids)
        self._vocab_size = len(token_bytes)
        self._tokenizer = make_tokenizer(token_bytes, special_ids)
        self._quick_guard = CompileGuard(token_bytes, special_ids, QUICK_CPU_S)
        self._guards = [
            CompileGuard(token_bytes, special_ids, MAX_CPU_S, COSTLY_NICENESS)
            for _ in range(NUM_COSTLY)
        ]
        # The last one used comes first: its helper runs already.
        self._free_guards: LifoQueue[CompileGuard] = LifoQueue()
        for guard in self._guards:
            self._free_guards.put(guard)

    def compile_quickly(
        self, field: str, grammar: str, eos_token_ids: Collection[int]
    ) -> MatcherConstraint:
        """The same as `compile`; raises OutOfTime when QUICK_CPU_S are not enough."""
        return self._compile(self._quick_guard, field, grammar, eos_token_ids)

    def compile(
        self, field: str, grammar: str, eos_token_ids: Collection[int]
    ) -> MatcherConstraint:
        """A constraint that took no token yet; `eos_token_ids` may end a complete text.

        Raises InvalidArgument of `field` for a grammar that is wrong, takes too much time or
        memory, or that no text fulfils but the empty one; TooSlow when the machine is too busy to
        tell.
        """
        guard = self._free_guards.get()
        try:
            return self._compile(guard, field, grammar, eos_token_ids)
        except OutOfTime as error:
            raise InvalidArgument(field, TOO_COSTLY) from error
        finally:
            self._free_guards.put(guard)

    def _compile(
        self, guard: CompileGuard, field: str, grammar: str, eos_token_ids: Collection[int]
    ) -> MatcherConstraint:
        try:
            reason = guard.check(grammar)
        except TooCostly:
            reason = TOO_COSTLY
        if reason is not None:
            raise InvalidArgument(field, reason)
        ends = tuple(sorted(eos_token_ids))
        try:
            return compile_grammar(grammar, self._tokenizer, self._vocab_size, ends)
        except ConstraintBroken as error:
            raise InvalidArgument(field, str(error)) from error

    def close(self) -> None:
        """Ends the helper processes."""
        for guard in (self._quick_guard, *self._guards):
            guard.close()
