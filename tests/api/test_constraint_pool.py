"""What waits for what when constraints are compiled: only costly ones for costly ones."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Collection, Iterator

import pytest

from protos.quire.inference.v1 import inference_pb2
from scheduler_svc import constraint_cache, constraint_pool
from scheduler_svc.constraint_pool import ConstraintPool
from scheduler_svc.text import grammar
from scheduler_svc.text.compile_guard import OutOfTime, TooSlow
from scheduler_svc.text.constraint_compiler import NUM_COSTLY, ConstraintCompiler
from scheduler_svc.text.matcher import MatcherConstraint, compile_grammar, make_tokenizer
from shared.errors import InvalidArgument, ResourceExhausted
from tests.masks import ids_of

TOKENIZER = make_tokenizer([b"a", b"b"], [])


class Compiler(ConstraintCompiler):
    """Knows by a pattern's words what becomes of it; costly ones take until `may_end`."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.calls: Counter[str] = Counter()

    def compile_quickly(
        self, field: str, grammar: str, eos_token_ids: Collection[int]
    ) -> MatcherConstraint:
        self.calls["quickly"] += 1
        if "costly" in grammar:
            raise OutOfTime
        if "slow" in grammar:
            raise TooSlow
        return self._compiled(field, grammar)

    def compile(
        self, field: str, grammar: str, eos_token_ids: Collection[int]
    ) -> MatcherConstraint:
        self.calls["costly"] += 1
        assert self.may_end.wait(10)
        return self._compiled(field, grammar)

    def _compiled(self, field: str, source: str) -> MatcherConstraint:
        if "wrong" in source:
            raise InvalidArgument(field, "it is wrong")
        return compile_grammar(grammar.of_regex("ab+"), TOKENIZER, 2, ())

    def close(self) -> None:
        self.may_end.set()


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture
def pool(compiler: Compiler) -> Iterator[ConstraintPool]:
    pool = ConstraintPool(compiler, has_tenants=False)
    yield pool
    pool.close()


def pattern(text: str) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text="hello", regex=text)


async def test_costly_ones_hold_up_no_others_and_have_a_bounded_queue(
    pool: ConstraintPool, compiler: Compiler
) -> None:
    most = constraint_pool.MAX_PENDING_COSTLY
    costly = [
        asyncio.create_task(pool.compile(pattern(f"costly{i}"), (), "acme"))
        for i in range(most + 1)
    ]
    done, _ = await asyncio.wait(costly, return_when=asyncio.FIRST_COMPLETED)
    [refused] = done
    error = refused.exception()
    assert isinstance(error, ResourceExhausted) and error.limit == "max_pending_constraints"
    assert await pool.compile(pattern("other"), (), "acme") is not None
    while compiler.calls["costly"] < NUM_COSTLY:
        await asyncio.sleep(0.001)
    assert not any(task.done() for task in costly if task is not refused)
    compiler.may_end.set()
    constraints = await asyncio.gather(*(task for task in costly if task is not refused))
    assert all(constraint is not None for constraint in constraints)
    assert compiler.calls["costly"] == most


async def test_no_tenant_takes_all_places_of_costly_ones(compiler: Compiler) -> None:
    pool = ConstraintPool(compiler, has_tenants=True)
    most = constraint_pool.MAX_COSTLY_OF_TENANT
    acme = [
        asyncio.create_task(pool.compile(pattern(f"costly{i}"), (), "acme"))
        for i in range(most + 1)
    ]
    done, _ = await asyncio.wait(acme, return_when=asyncio.FIRST_COMPLETED)
    [refused] = done
    error = refused.exception()
    assert isinstance(error, ResourceExhausted) and error.limit == "max_pending_constraints"
    other = [
        asyncio.create_task(pool.compile(pattern(f"costly{i}"), (), "other")) for i in range(most)
    ]
    compiler.may_end.set()
    await asyncio.gather(*other, *(task for task in acme if task is not refused))
    await pool.compile(pattern("costly, later"), (), "acme")  # places are given back
    pool.close()


async def test_what_is_known_is_not_compiled_again(
    pool: ConstraintPool, compiler: Compiler
) -> None:
    first = await pool.compile(pattern("one"), (2, 3), "acme")
    assert first is not None and first.accept(0)
    again = await pool.compile(pattern("one"), (3, 2), "acme")
    assert again is not None and again.mask is not None
    assert ids_of(again.mask) == [0], "it took no token yet"
    assert compiler.calls["quickly"] == 1
    await pool.compile(pattern("one"), (2,), "acme")
    await pool.compile(inference_pb2.GenerateRequest(grammar="one"), (2, 3), "acme")
    assert compiler.calls["quickly"] == 3, "other ends, and another kind"


async def test_no_tenant_sees_by_time_what_others_constrain_by(
    pool: ConstraintPool, compiler: Compiler
) -> None:
    for tenant in ("acme", "other", "acme", "other"):
        await pool.compile(pattern("one"), (), tenant)
    assert compiler.calls["quickly"] == 2


async def test_many_that_come_with_the_same_wait_for_one_compilation(
    pool: ConstraintPool, compiler: Compiler
) -> None:
    """A batch of requests with one schema costs what one of them costs, and none is refused."""
    same = [asyncio.create_task(pool.compile(pattern("costly"), (), "acme")) for _ in range(100)]
    wrong = [
        asyncio.create_task(pool.compile(pattern("costly, wrong"), (), "acme")) for _ in range(100)
    ]
    while compiler.calls["costly"] < 2:
        await asyncio.sleep(0.001)
    same.pop(0).cancel()  # who came first may leave; the others wait on
    compiler.may_end.set()
    one, other, *_ = await asyncio.gather(*same)
    assert one is not None and other is not None and one.accept(0)
    assert other.mask is not None and ids_of(other.mask) == [0], "it took no token yet"
    errors = await asyncio.gather(*wrong, return_exceptions=True)
    assert all(isinstance(error, InvalidArgument) for error in errors)
    assert compiler.calls == {"quickly": 2, "costly": 2}


async def test_a_refusal_is_known_too(pool: ConstraintPool, compiler: Compiler) -> None:
    compiler.may_end.set()
    for _ in range(3):
        with pytest.raises(InvalidArgument, match="regex: it is wrong"):
            await pool.compile(pattern("costly and wrong"), (), "acme")
    assert compiler.calls == {"quickly": 1, "costly": 1}


async def test_what_a_busy_machine_could_not_tell_may_be_tried_again(
    pool: ConstraintPool, compiler: Compiler
) -> None:
    for _ in range(2):
        with pytest.raises(ResourceExhausted) as refused:
            await pool.compile(pattern("slow"), (), "acme")
        assert refused.value.retry_after_s > 0
    assert compiler.calls["quickly"] == 2


async def test_the_oldest_make_room(
    pool: ConstraintPool, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraint_cache, "MAX_COMPILED", 2)
    monkeypatch.setattr(constraint_cache, "MAX_REFUSED", 1)
    for text in ("one", "two", "one", "three", "one", "two"):
        await pool.compile(pattern(text), (), "acme")
    assert compiler.calls["quickly"] == 4, "two has made room for three"
    for text in ("wrong 1", "wrong 2", "wrong 2", "wrong 1"):
        with pytest.raises(InvalidArgument):
            await pool.compile(pattern(text), (), "acme")
    assert compiler.calls["quickly"] == 4 + 3
