r"""Constraints of requests, compiled off the event loop.

    known ----------------------------------------------------------> at once
    being compiled for another request -----------------------------> with that one
    new, one at a time, with little processor time -- enough -------> compiled
                                                   \- not enough --> again, behind other costly ones

So what costs little, as nearly all does, never waits for what costs much.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial

from protos.quire.inference.v1 import inference_pb2
from scheduler_svc.bounded_threads import BoundedThreads
from scheduler_svc.constraint_cache import ConstraintCache, key_of
from scheduler_svc.core.constraint import TokenConstraint
from scheduler_svc.text import grammar
from scheduler_svc.text.compile_guard import OutOfTime, TooSlow
from scheduler_svc.text.constraint_compiler import NUM_COSTLY, ConstraintCompiler
from scheduler_svc.text.matcher import MatcherConstraint
from shared.errors import InvalidArgument, ResourceExhausted

Compile = Callable[[str, str, Collection[int]], MatcherConstraint]

RETRY_AFTER_S = 1.0
MAX_PENDING = 64
"""Constraints that are compiled or wait for it; requests of further ones get RESOURCE_EXHAUSTED."""
MAX_PENDING_COSTLY = 12
"""Of these, those that need more than a little processor time; the last waits for a second."""
MAX_COSTLY_OF_TENANT = MAX_PENDING_COSTLY // 2
"""Of these, one tenant's, where there are several: the others find a place."""


class ConstraintPool:
    """Compiles for one model, in threads of its own: a costly grammar keeps no text waiting."""

    def __init__(self, compiler: ConstraintCompiler, *, has_tenants: bool) -> None:
        """`has_tenants`: whether there are several, of which none may take all places."""
        self._compiler = compiler
        self._max_costly_of_tenant = MAX_COSTLY_OF_TENANT if has_tenants else MAX_PENDING_COSTLY
        self._num_costly: Counter[str] = Counter()
        self._cache = ConstraintCache()
        self._tasks: dict[bytes, asyncio.Task[MatcherConstraint]] = {}
        """What is compiled now, by its key: who needs the same waits for the same."""
        self._quick = BoundedThreads(
            1, MAX_PENDING, lambda: _full(f"{MAX_PENDING} constraints wait to be compiled")
        )
        self._costly = BoundedThreads(
            NUM_COSTLY,
            MAX_PENDING_COSTLY,
            lambda: _full(f"{MAX_PENDING_COSTLY} costly constraints wait to be compiled"),
        )

    async def compile(
        self, message: inference_pb2.GenerateRequest, eos_token_ids: Collection[int], tenant: str
    ) -> TokenConstraint | None:
        """The constraint of a checked message; None when it has none. `eos_token_ids` may end a
        complete text. What one tenant sent is no faster for another, so that none can ask by time.

        Raises InvalidArgument for what does not compile within the limits, ResourceExhausted when
        too many wait, or the machine is too busy to tell what it takes.
        """
        field = message.WhichOneof("constraint")
        if field is None:
            return None
        key = key_of(message, eos_token_ids, tenant)
        if (kept := self._cache.get(key)) is not None:
            return kept
        if (task := self._tasks.get(key)) is None:
            task = asyncio.create_task(
                self._compile(key, str(field), message, eos_token_ids, tenant)
            )
            self._tasks[key] = task
            task.add_done_callback(partial(self._note_done, key))
        return (await asyncio.shield(task)).copy()

    async def _compile(
        self,
        key: bytes,
        field: str,
        message: inference_pb2.GenerateRequest,
        eos_token_ids: Collection[int],
        tenant: str,
    ) -> MatcherConstraint:
        def by(compile_: Compile) -> MatcherConstraint:
            return compile_(field, _grammar_of(field, message), eos_token_ids)

        try:
            try:
                constraint = await self._quick.run(lambda: by(self._compiler.compile_quickly))
            except OutOfTime:
                constraint = await self._run_costly(lambda: by(self._compiler.compile), tenant)
        except InvalidArgument as refusal:
            self._cache.refuse(key, refusal)
            raise
        except TooSlow as error:
            raise _full("the server is too busy to compile it") from error
        self._cache.keep(key, constraint)
        return constraint

    async def _run_costly(
        self, compile_: Callable[[], MatcherConstraint], tenant: str
    ) -> MatcherConstraint:
        if self._num_costly[tenant] >= self._max_costly_of_tenant:
            raise _full(f"{self._max_costly_of_tenant} costly constraints of yours wait already")
        self._num_costly[tenant] += 1
        try:
            return await self._costly.run(compile_)
        finally:
            self._num_costly[tenant] -= 1

    def _note_done(self, key: bytes, task: asyncio.Task[MatcherConstraint]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            task.exception()  # seen, also when all who waited have left

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
