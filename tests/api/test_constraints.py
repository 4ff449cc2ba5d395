"""Structured output as a client meets it; the worker draws whatever the masks allow."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from typing import Any

import grpc
import jsonschema
import pytest
from google.rpc import error_details_pb2

from protos.quire.inference.v1 import inference_pb2 as pb
from scheduler_svc import constraint_pool
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.text.compile_guard import CompileGuard
from scheduler_svc.text.tokenizer import TextModel
from shared.model_spec import ModelSpec
from tests.api.fake_worker import joined
from tests.api.serving import (
    SERVING,
    Answer,
    answer,
    detail,
    error_of,
    opened,
    request,
    serving,
    violated_field,
)
from tests.api.tiny_model import EOS

COMPLETE = pb.FINISH_REASON_CONSTRAINT_COMPLETE
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "ü"]}, "minItems": 1, "maxItems": 3},
        "size": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}


def guided(text: str = "hello", **fields: Any) -> pb.GenerateRequest:
    """A request whose constraint is SCHEMA, unless `fields` say otherwise."""
    if not {"json_schema", "json_object", "regex", "choice", "grammar"} & fields.keys():
        fields["json_schema"] = json.dumps(SCHEMA)
    return request(text, max_tokens=fields.pop("max_tokens", 150), **fields)


def check(got: Answer) -> None:
    """The text is JSON of SCHEMA, and its last token ended it."""
    jsonschema.validate(json.loads(got.text), SCHEMA)
    assert got.finished.reason == COMPLETE
    assert got.finished.usage.num_output_tokens == len(got.token_ids) == len(got.text.encode())


async def test_json_of_a_schema(spec: ModelSpec, text_model: TextModel) -> None:
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(SERVING)
        got = await answer(served, guided())
        check(got)
        again = guided(sampling=pb.SamplingParams(n=3))
        together = await asyncio.gather(*(answer(served, again) for _ in range(3)))
        free = await answer(served, request("free", max_tokens=20))
        assert len(free.token_ids) == 20
        await served.wait_idle()
    for several in together:
        for index in range(3):
            own = [r.delta for r in several.responses if r.sequence_index == index]
            assert "".join(delta.text for delta in own) == got.text


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"json_object": True}, r"\{.*"),
        ({"regex": "[a-f]{4}-[0-9]+!"}, r"[a-f]{4}-[0-9]+.*"),
        ({"choice": pb.Choices(options=["yes", "no", "näh"])}, "yes|no|näh"),
        ({"grammar": 'start: "<" WORD ">"\nWORD: /[a-z]{3}/'}, "<[a-z]{3}>"),
    ],
    ids=["json_object", "regex", "choice", "grammar"],
)
async def test_each_kind(
    spec: ModelSpec, text_model: TextModel, fields: dict[str, Any], pattern: str
) -> None:
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(SERVING)
        got = await answer(served, guided(max_tokens=60, **fields))
    assert re.fullmatch(pattern, got.text, re.DOTALL), got.text
    if "choice" in fields or "grammar" in fields:
        assert got.finished.reason == COMPLETE


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"beam": pb.BeamParams(width=2)}, "json_schema"),
    "empty schema": ({"json_schema": ""}, "json_schema"),
    "empty pattern": ({"regex": ""}, "regex"),
    "empty grammar": ({"grammar": ""}, "grammar"),
    "no": ({"json_object": False}, "json_object"),
    "no option": ({"choice": pb.Choices()}, "choice.options"),
    "empty option": ({"choice": pb.Choices(options=["a", ""])}, "choice.options[1]"),
    "options": ({"choice": pb.Choices(options=["a"] * 1001)}, "choice.options"),
    "long options": ({"choice": pb.Choices(options=["a" * 40_000] * 2)}, "choice.options"),
    "a megabyte of schema": (
        {"json_schema": json.dumps({"title": "x" * 1_000_000})},
        "json_schema",
    ),
    "a megabyte of pattern": ({"regex": "a" * 1_000_000}, "regex"),
    "bad pattern": ({"regex": "("}, "regex"),
    "pattern in schema": ({"json_schema": '{"type": "string", "pattern": "(a"}'}, "json_schema"),
    "bad grammar": ({"grammar": "nothing"}, "grammar"),
    "unknown keyword": ({"json_schema": '{"minlength": 1}'}, "json_schema"),
}


async def test_bad_constraints_are_refused_by_field(spec: ModelSpec, text_model: TextModel) -> None:
    """FIELD-FAILURES part 4: a bad pattern in a schema. No worker is asked."""
    async with serving(spec, text_model) as served:
        for name, (fields, field) in BAD.items():
            error = await error_of(served.generation.Generate(guided(**fields)))
            assert violated_field(error) == field, name


async def test_a_slow_compilation_holds_nobody_up_and_has_a_bounded_queue(
    spec: ModelSpec, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()

    def check_slowly(self: CompileGuard, grammar: str) -> str | None:
        assert may_end.wait(10)
        return "it takes too long"

    monkeypatch.setattr(CompileGuard, "check", check_slowly)
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(SERVING)
        try:
            calls = [
                asyncio.create_task(error_of(served.generation.Generate(guided(regex=f"a{i}"))))
                for i in range(constraint_pool.MAX_PENDING + 1)
            ]
            done, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            assert len((await answer(served, request())).token_ids) == 8
            assert (await served.tokenizer.Tokenize(pb.TokenizeRequest(text="a"))).token_ids
            assert len(done) == 1 and not any(call.done() for call in waiting)
        finally:
            may_end.set()
        full = done.pop().result()
        assert full.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        metadata = detail(full, error_details_pb2.ErrorInfo).metadata
        assert metadata["limit"] == "max_pending_constraints"
        for error in await asyncio.gather(*waiting):
            assert violated_field(error) == "regex"


async def test_other_ends_cut_the_same_text(spec: ModelSpec, text_model: TextModel) -> None:
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(SERVING)
        whole = (await answer(served, guided())).text
        cut = await answer(served, guided(max_tokens=9))
        assert (cut.text, cut.finished.reason) == (whole[:9], pb.FINISH_REASON_MAX_TOKENS)
        stopping = pb.StoppingParams(stop_strings=['"tags"'])
        stopped = await answer(served, guided(stopping=stopping))
        assert stopped.text == whole[: whole.index('"tags"')]
        assert stopped.finished.reason == pb.FINISH_REASON_STOP_STRING
        comma = pb.StoppingParams(stop_token_ids=[ord(",")])
        stopped = await answer(served, guided(stopping=comma))
        assert stopped.text == whole[: whole.index(",")]
        assert stopped.finished.reason == pb.FINISH_REASON_STOP_TOKEN


async def test_the_model_ends_a_complete_text_unless_its_end_is_ignored(
    spec: ModelSpec, text_model: TextModel
) -> None:
    """The worker wants to end at once; the pattern lets it after two letters."""
    async with (
        serving(spec, text_model) as served,
        joined(served.worker(next_token=lambda _: EOS)),
    ):
        await served.wait_status(SERVING)
        got = await answer(served, guided(regex="[a-z]{2,5}"))
        assert len(got.text) == 2
        assert got.finished.reason == pb.FINISH_REASON_EOS
        ignoring = pb.StoppingParams(ignore_eos=True)
        got = await answer(served, guided(regex="[a-z]{2,5}", stopping=ignoring))
        assert len(got.text) == 5
        assert got.finished.reason == COMPLETE


async def test_a_worker_that_breaks_the_mask_fails_the_request_alone(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with (
        serving(spec, text_model) as served,
        joined(served.worker(obeys_masks=False)),
    ):
        await served.wait_status(SERVING)
        errors, free = await asyncio.gather(
            error_of(served.generation.Generate(guided(regex="[0-9]+"))),
            answer(served, request("free")),
        )
        assert errors.code() is grpc.StatusCode.ABORTED
        assert len(free.token_ids) == 8
        await served.wait_idle()


async def test_preemption_and_cached_prefixes_change_nothing(
    spec: ModelSpec, text_model: TextModel
) -> None:
    """Five at once in a pool that holds two or three, then one with a warm cache."""
    messages = [guided(f"prompt {number}") for number in range(5)]
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(SERVING)
        alone = [(await answer(served, message)).text for message in messages]
    core = SchedulerConfig(reserve_fraction=0.0)
    async with serving(spec, text_model, core=core) as served, joined(served.worker(num_blocks=12)):
        await served.wait_status(SERVING)
        crowded = await asyncio.gather(*(answer(served, message) for message in messages))
        warm = await answer(served, messages[0])
        await served.wait_idle()
    assert [got.text for got in crowded] == alone
    assert sum(got.finished.timings.num_preemptions for got in crowded) > 0
    assert warm.text == alone[0]
    for got in (*crowded, warm):
        check(got)


async def test_a_killed_worker_changes_nothing(spec: ModelSpec, text_model: TextModel) -> None:
    messages = [guided(f"prompt {number}") for number in range(4)]
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(SERVING)
        alone = [(await answer(served, message)).text for message in messages]
    async with serving(spec, text_model) as served:
        workers = [served.worker(worker_id=f"worker-{index}") for index in range(2)]
        async with joined(*workers):
            while served.server.engine.registry.num_ready < 2:
                await served.status()
            streams = [await opened(served, message) for message in messages]
            for stream in streams:
                await stream.read()
            for worker in workers:
                worker.hold()
            await workers[0].kill()
            workers[1].release()
            answers = [await stream.rest() for stream in streams]
            await served.wait_idle()
    assert [got.text for got in answers] == alone
    assert any("recovered" in got.kinds for got in answers)
    for got in answers:
        check(got)
