"""Constraints of requests, compiled off the event loop, one at a time."""

from __future__ import annotations

from collections.abc import Collection

from protos.quire.inference.v1 import inference_pb2
from scheduler_svc.bounded_threads import BoundedThreads
from scheduler_svc.core.constraint import TokenConstraint
from scheduler_svc.text import grammar
from scheduler_svc.text.constraint_compiler import ConstraintCompiler
from shared.errors import ResourceExhausted

RETRY_AFTER_S = 1.0
MAX_PENDING = 64
"""Requests whose constraint is compiled or waits for it; further ones get RESOURCE_EXHAUSTED."""


class ConstraintPool:
    """Compiles for one model, in a thread of its own: a costly grammar keeps no text waiting."""

    def __init__(self, compiler: ConstraintCompiler) -> None:
        self._compiler = compiler
        self._threads = BoundedThreads(
            1,
            MAX_PENDING,
            lambda: ResourceExhausted(
                "max_pending_constraints",
                f"{MAX_PENDING} constraints wait to be compiled",
                RETRY_AFTER_S,
            ),
        )

    async def compile(
        self, message: inference_pb2.GenerateRequest, eos_token_ids: Collection[int]
    ) -> TokenConstraint | None:
        """The constraint of a checked message; None when it has none. `eos_token_ids` may end a
        complete text.

        Raises InvalidArgument for what does not compile within the limits.
        """
        field = message.WhichOneof("constraint")
        if field is None:
            return None
        name = str(field)
        return await self._threads.run(
            lambda: self._compiler.compile(name, _grammar_of(name, message), eos_token_ids)
        )

    def close(self) -> None:
        """Ends thread and helper process."""
        self._threads.close()
        self._compiler.close()


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
