r"""Constraints of requests, compiled off the event loop.

    known ----------------------------------------------------------> at once
    new, one at a time, with little processor time -- enough -------> compiled
                                                   \- not enough --> again, behind other costly ones

So what costs little, as nearly all does, never waits for what costs much.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from protos.quire.inference.v1 import inference_pb2
from scheduler_svc.bounded_threads import BoundedThreads
from scheduler_svc.constraint_cache import ConstraintCache, key_of
from scheduler_svc.core.constraint import TokenConstraint
from scheduler_svc.text import grammar
from scheduler_svc.text.compile_guard import OutOfTime, TooSlow
from scheduler_svc.text.constraint_compiler import NUM_COSTLY, ConstraintCompiler
from scheduler_svc.text.matcher import MatcherConstraint
from shared.errors import InvalidArgument, ResourceExhausted

RETRY_AFTER_S = 1.0
MAX_PENDING = 64
"""Requests whose constraint is compiled or waits for it; further ones get RESOURCE_EXHAUSTED."""
MAX_PENDING_COSTLY = 12
"""Of these, those that need more than a little processor time; the last waits for a second."""


class ConstraintPool:
    """Compiles for one model, in threads of its own: a costly grammar keeps no text waiting."""

    def __init__(self, compiler: ConstraintCompiler) -> None:
        self._compiler = compiler
        self._cache = ConstraintCache()
        self._quick = BoundedThreads(
            1, MAX_PENDING, lambda: _full(f"{MAX_PENDING} constraints wait to be compiled")
        )
        self._costly = BoundedThreads(
            NUM_COSTLY,
            MAX_PENDING_COSTLY,
            lambda: _full(f"{MAX_PENDING_COSTLY} costly constraints wait to be compiled"),
        )

    async def compile(
        self, message: inference_pb2.GenerateRequest, eos_token_ids: Collection[int]
    ) -> TokenConstraint | None:
        """The constraint of a checked message; None when it has none. `eos_token_ids` may end a
        complete text.

        Raises InvalidArgument for what does not compile within the limits, ResourceExhausted when
        too many wait, or the machine is too busy to tell what it takes.
        """
        field = message.WhichOneof("constraint")
        if field is None:
            return None
        key = key_of(message, eos_token_ids)
        if (kept := self._cache.get(key)) is not None:
            return kept
        try:
            constraint = await self._compile(str(field), message, eos_token_ids)
        except InvalidArgument as refusal:
            self._cache.refuse(key, refusal)
            raise
        except TooSlow as error:
            raise _full("the server is too busy to compile it") from error
        self._cache.keep(key, constraint)
        return constraint.copy()

    async def _compile(
        self, field: str, message: inference_pb2.GenerateRequest, eos_token_ids: Collection[int]
    ) -> MatcherConstraint:
        def run(
            compile_: Callable[[str, str, Collection[int]], MatcherConstraint],
        ) -> MatcherConstraint:
            return compile_(field, _grammar_of(field, message), eos_token_ids)

        try:
            return await self._quick.run(lambda: run(self._compiler.compile_quickly))
        except OutOfTime:
            return await self._costly.run(lambda: run(self._compiler.compile))

    def close(self) -> None:
        """Ends threads and helper processes."""
        self._quick.close()
        self._costly.close()
        self._compiler.close()


def _full(text: str) -> ResourceExhausted:
    return ResourceExhausted("max_pending_constraints", text, RETRY_AFTER_S)


def _grammar_of(field: str, message: inference_pb2.GenerateRequest) -> str:
    match field:
        case "json_schema":
            return grammar.of_json_schema(message.json_schema)
        case "json_object":
            return grammar.of_json_object()
        case "regex":
            return grammar.of_regex(message.regex)
        case "choice":
            return grammar.of_choice(message.choice.options)
        case _:
            return grammar.of_lark(message.grammar)
