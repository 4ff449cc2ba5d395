"""What is detached is kept for its time and within its limits, for its own tenant alone."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from protos.quire.inference.v1 import inference_pb2
from scheduler_svc.quotas import Quota, QuotaConfig
from scheduler_svc.security_config import ClientToken, SecurityConfig
from scheduler_svc.text.tokenizer import TextModel
from shared.model_spec import ModelSpec
from tests.api.detaching import ABORT, attach, detachable, forgotten, some, until_detached
from tests.api.fake_worker import joined
from tests.api.serving import Answer, answer, detail, error_of, request, serving, violated_field


@pytest.mark.parametrize("is_held", [True, False])
async def test_nothing_is_left_after_the_time_to_live(
    spec: ModelSpec, text_model: TextModel, is_held: bool
) -> None:
    """A running request is aborted, the events of an ended one are forgotten: IDLE, NOT_FOUND."""
    async with serving(spec, text_model) as served:
        worker = served.worker()
        async with joined(worker):
            await served.wait_status(1)
            if is_held:
                worker.hold()
            await some(served.generation.Generate(detachable(detach_ttl_s=1)), 1)
            await until_detached(served)
            again = detachable(detach_ttl_s=1)
            in_use = await error_of(served.generation.Generate(again))
            await forgotten(served)
            await served.wait_live(0)
            worker.release()
            await served.wait_idle()
            gone = await error_of(attach(served, 0))
            assert (await answer(served, again)).kinds == ["started", "delta", "finished"]
    assert in_use.code() is grpc.StatusCode.ALREADY_EXISTS
    assert gone.code() is grpc.StatusCode.NOT_FOUND


async def test_what_was_refused_is_not_kept(spec: ModelSpec, text_model: TextModel) -> None:
    """A client's gRPC library may repeat it under the same id."""
    async with serving(spec, text_model) as served:
        for _ in range(2):
            error = await error_of(served.generation.Generate(detachable()))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert (await served.state()).num_detachable == 0


async def test_another_tenant_finds_nothing(spec: ModelSpec, text_model: TextModel) -> None:
    """No word tells a request of another tenant's from one that never was."""
    tokens = (ClientToken(b"one", "acme"), ClientToken(b"two", "other"))
    acme, other = ((("authorization", f"Bearer {name}"),) for name in ("one", "two"))
    async with serving(spec, text_model, security=SecurityConfig(tokens=tokens)) as served:
        worker = served.worker()
        async with joined(worker):
            await served.wait_status(1)
            await some(served.generation.Generate(detachable(), metadata=acme), 1)
            theirs = await error_of(attach(served, 0, metadata=other))
            nobodys = await error_of(attach(served, 0, request_id="none", metadata=other))
            got = [response async for response in attach(served, 0, metadata=acme)]
    assert theirs.code() is nobodys.code() is grpc.StatusCode.NOT_FOUND
    assert theirs.details() == nobodys.details()
    assert Answer(got).finished.usage.num_output_tokens == 8


async def test_kept_tokens_have_a_limit(spec: ModelSpec, text_model: TextModel) -> None:
    """A request counts for all it may come to, and from its end on for what it came to."""
    async with (
        serving(spec, text_model, max_detached_tokens=350) as served,
        joined(served.worker()),
    ):
        await served.wait_status(1)
        whole = await answer(served, request(max_tokens=200))
        stopped = detachable(max_tokens=200, stop=(whole.text[:3],))
        assert (await answer(served, stopped)).finished.stop_string
        second = detachable(request_id="second", max_tokens=200, detach_ttl_s=1)
        assert (await answer(served, second)).finished.usage.num_output_tokens == 200
        third = detachable(request_id="third", max_tokens=200)
        error = await error_of(served.generation.Generate(third))
        while (await served.state()).num_detachable > 1:
            await asyncio.sleep(0.05)
        assert (await answer(served, third)).finished.usage.num_output_tokens == 200
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert detail(error, error_details_pb2.ErrorInfo).metadata["limit"] == "max_detached_tokens"


async def test_log_probabilities_count_as_further_tokens(
    spec: ModelSpec, text_model: TextModel
) -> None:
    """Of 32 at each place the events are six times as large."""
    response = inference_pb2.ResponseOptions(num_logprobs=32)
    async with serving(spec, text_model, max_detached_tokens=300) as served:
        heavy = detachable(max_tokens=50, response=response)
        error = await error_of(served.generation.Generate(heavy))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        light = await error_of(served.generation.Generate(detachable(max_tokens=50)))
    assert light.code() is grpc.StatusCode.UNAVAILABLE  # no worker: it was let in


async def test_an_ended_request_is_kept_at_no_cost_to_its_tenants_quota(
    spec: ModelSpec, text_model: TextModel
) -> None:
    quotas = QuotaConfig(others=Quota(requests=1, tokens=100))
    async with serving(spec, text_model, quotas=quotas) as served, joined(served.worker()):
        await served.wait_status(1)
        for name in ("a", "b"):
            await answer(served, detachable(request_id=name, max_tokens=90))
        assert (await served.state()).num_detachable == 2


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("disconnect", {"disconnect": 9}),
        ("detach_ttl_s", {"detach_ttl_s": 3601}),
        ("detach_ttl_s", {"disconnect": ABORT, "detach_ttl_s": 1}),
    ],
)
async def test_wrong_policies_are_named(
    spec: ModelSpec, text_model: TextModel, field: str, fields: dict[str, Any]
) -> None:
    async with serving(spec, text_model) as served:
        error = await error_of(served.generation.Generate(detachable(**fields)))
    assert violated_field(error) == field


async def test_wrong_attach_calls_are_named(spec: ModelSpec, text_model: TextModel) -> None:
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        whole = await answer(served, detachable(detach_ttl_s=3600))
        beyond = attach(served, len(whole.responses) + 1)
        assert violated_field(await error_of(beyond)) == "after_event"
        assert violated_field(await error_of(attach(served, 0, disconnect=9))) == "disconnect"
        too_long = attach(served, 0, request_id="x" * 129)
        assert violated_field(await error_of(too_long)) == "request_id"
        assert [r async for r in attach(served, len(whole.responses))] == []
