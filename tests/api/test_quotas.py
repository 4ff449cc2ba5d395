"""What a tenant may have, at a time and per minute."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2

from protos.quire.inference.v1 import inference_pb2
from scheduler_svc.config import parse_config
from scheduler_svc.quota_file import read_quotas
from scheduler_svc.quotas import Quota, QuotaConfig, TenantQuotas, TokenBucket
from scheduler_svc.security_config import ClientToken, SecurityConfig
from scheduler_svc.text.tokenizer import TextModel
from shared.errors import ConfigError, InvalidArgument, ResourceExhausted
from shared.model_spec import ModelSpec
from tests.api.fake_worker import joined
from tests.api.serving import OpenStream, answer, detail, error_of, opened, request, serving

FILE = """
# tenant  limits
acme      requests=3 tokens_per_min=600   # twice a second
*         requests_per_min=60
"""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def quotas(clock: Clock, **limits: int) -> TenantQuotas:
    return TenantQuotas(QuotaConfig({"acme": Quota(**limits)}), clock)


def refusal(accounts: TenantQuotas, num_sequences: int, num_tokens: int) -> ResourceExhausted:
    with pytest.raises(ResourceExhausted) as caught:
        accounts.enter("acme", num_sequences, "sampling.n").charge(num_tokens)
    return caught.value


def test_a_bucket_fills_steadily_and_no_further_than_its_size() -> None:
    bucket = TokenBucket(60, now=0.0)
    assert bucket.delay_s(60, now=0.0) == 0
    bucket.add(-60)
    assert bucket.delay_s(10, now=0.0) == 10
    assert bucket.delay_s(10, now=9.0) == 1
    assert bucket.delay_s(10, now=10.0) == 0
    assert bucket.delay_s(60, now=1000.0) == 0
    bucket.add(-60)
    assert bucket.delay_s(1, now=1000.0) == 1


def test_what_is_larger_than_a_bucket_passes_when_it_is_full_and_is_paid_later() -> None:
    bucket = TokenBucket(60, now=0.0)
    assert bucket.delay_s(600, now=0.0) == 0
    bucket.add(-600)
    assert bucket.delay_s(1, now=0.0) == 541
    assert bucket.delay_s(600, now=599.0) == 1


def test_requests_at_a_time_are_counted_by_their_sequences() -> None:
    """FIELD-FAILURES part 4: n=4 counts as 4."""
    accounts = quotas(Clock(), requests=5)
    lease = accounts.enter("acme", 4, "sampling.n")
    assert refusal(accounts, 2, 1).limit == "tenant_requests"
    accounts.enter("acme", 1, "sampling.n")
    accounts.enter("other", 4, "sampling.n")
    lease.close(0)
    accounts.enter("acme", 4, "sampling.n")
    with pytest.raises(InvalidArgument, match=r"beam\.width"):
        accounts.enter("acme", 6, "beam.width")


def test_tokens_at_a_time_are_held_until_the_end() -> None:
    accounts = quotas(Clock(), tokens=100)
    lease = accounts.enter("acme", 1, "sampling.n")
    lease.charge(80)
    other = accounts.enter("acme", 1, "sampling.n")
    with pytest.raises(ResourceExhausted) as caught:
        other.charge(21)
    assert caught.value.limit == "tenant_tokens"
    other.close(0)
    lease.close(80)
    accounts.enter("acme", 1, "sampling.n").charge(100)
    with pytest.raises(InvalidArgument, match=r"stopping\.max_tokens"):
        accounts.enter("acme", 1, "sampling.n").charge(101)


def test_what_was_not_used_comes_back() -> None:
    clock = Clock()
    accounts = quotas(clock, tokens_per_min=600)
    lease = accounts.enter("acme", 1, "sampling.n")
    lease.charge(600)
    refused = refusal(accounts, 1, 100)
    assert (refused.limit, refused.retry_after_s) == ("tenant_tokens_per_min", 10.0)
    lease.close(450)
    accounts.enter("acme", 1, "sampling.n").charge(150)
    clock.now += 5
    assert refusal(accounts, 1, 60).retry_after_s == 1.0


def test_requests_per_minute_say_when_to_try_again() -> None:
    clock = Clock()
    accounts = quotas(clock, requests_per_min=2)
    for _ in range(2):
        accounts.enter("acme", 1, "sampling.n").close(0)
    refused = refusal(accounts, 1, 1)
    assert (refused.limit, refused.retry_after_s) == ("tenant_requests_per_min", 30.0)
    clock.now += 30.0
    accounts.enter("acme", 1, "sampling.n")


def test_the_advice_follows_how_long_requests_took() -> None:
    clock = Clock()
    accounts = quotas(clock, requests=1)
    for _ in range(100):
        lease = accounts.enter("acme", 1, "sampling.n")
        clock.now += 20.0
        lease.close(0)
    accounts.enter("acme", 1, "sampling.n")
    assert refusal(accounts, 1, 1).retry_after_s == pytest.approx(20.0, rel=0.01)


def test_a_file_has_a_line_for_each_tenant(tmp_path: Path) -> None:
    path = tmp_path / "quotas"
    path.write_text(FILE)
    found = read_quotas(path, {"default", "acme"})
    assert found.of("acme") == Quota(requests=3, tokens_per_min=600)
    assert found.of("default") == Quota(requests_per_min=60)
    flags = ["--model", "m.gguf", "--quota-file", str(path)]
    with pytest.raises(ConfigError, match="names 'acme'"):
        parse_config(flags, {})
    path.write_text("default requests=1")
    assert parse_config(flags, {}).quotas == QuotaConfig({"default": Quota(requests=1)})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("acme", "gives no limit"),
        ("acme requests", "whole number"),
        ("acme requests=0", "whole number"),
        ("acme requests=-1", "whole number"),
        ("acme speed=3", "should be one of requests, tokens,"),
        ("acme requests=1 requests=2", "should be one of"),
        ("acme requests=1\nacme tokens=2", "line 2 of .* has a line already"),
        ("stranger requests=1", "names 'stranger'"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "quotas"
    path.write_text(line)
    with pytest.raises(ConfigError, match=words):
        read_quotas(path, {"acme"})


BEARER = {name: (("authorization", f"Bearer {name}"),) for name in ("one", "two")}
TENANTS = SecurityConfig(tokens=(ClientToken(b"one", "acme"), ClientToken(b"two", "other")))


async def test_one_tenant_at_its_quota_leaves_others_alone(
    spec: ModelSpec, text_model: TextModel
) -> None:
    """FIELD-FAILURES part 4: RESOURCE_EXHAUSTED with the limit's name and a delay."""
    limits = QuotaConfig({"acme": Quota(requests=2)})
    async with serving(spec, text_model, security=TENANTS, quotas=limits) as served:
        worker = served.worker()
        async with joined(worker):
            await served.wait_status(1)
            worker.hold()
            choices = inference_pb2.SamplingParams(n=2)
            first = await opened(served, request(sampling=choices), BEARER["one"])
            call = served.generation.Generate(request(), metadata=BEARER["one"])
            error = await error_of(call)
            other = OpenStream(served, request(), BEARER["two"])
            worker.release()
            assert (await other.rest()).kinds == ["started", "delta", "finished"]
            await first.rest()
            gone = await opened(served, request(sampling=choices), BEARER["one"])
            gone.cancel()
            again = OpenStream(served, request(), BEARER["one"])
            while await again.refused():  # until the server has seen the cancel
                again = OpenStream(served, request(), BEARER["one"])
            assert (await again.rest()).kinds == ["started", "delta", "finished"]
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert detail(error, error_details_pb2.ErrorInfo).metadata["limit"] == "tenant_requests"
    assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToNanoseconds() > 0


async def test_a_request_is_charged_for_what_it_used(
    spec: ModelSpec, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = partial(TenantQuotas, clock=lambda: 100.0)
    monkeypatch.setattr("scheduler_svc.server.TenantQuotas", frozen)
    limits = QuotaConfig(others=Quota(tokens_per_min=240))

    def delay_s(error: grpc.aio.AioRpcError) -> float:
        assert detail(error, error_details_pb2.ErrorInfo).metadata["limit"] == (
            "tenant_tokens_per_min"
        )
        return detail(error, error_details_pb2.RetryInfo).retry_delay.ToNanoseconds() / 1e9

    async with serving(spec, text_model, quotas=limits) as served:
        refused = await error_of(served.generation.Generate(request(max_tokens=200)))
        assert refused.code() is grpc.StatusCode.UNAVAILABLE  # no worker yet: costs nothing
        async with joined(served.worker()):
            await served.wait_status(1)
            whole = await answer(served, request("hello", max_tokens=200))
            # 5 tokens of prompt and 200 of the answer: 35 of 240 are left, and 4 come a second.
            error = await error_of(served.generation.Generate(request("hello", max_tokens=200)))
            assert delay_s(error) == (205 - 35) / 4
            stopped = request("hello", max_tokens=15, stop=(whole.text[:3],))
            for _ in range(2):
                # Takes 20, and gives 12 back: its answer ended after 3 tokens.
                assert (await answer(served, stopped)).finished.stop_string == whole.text[:3]
            error = await error_of(served.generation.Generate(stopped))
            assert delay_s(error) == (20 - 19) / 4


async def test_calls_of_the_tokenizer_are_requests_of_the_minute(
    spec: ModelSpec, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They cost the processor's time too. What is wrong, and the model calls, cost nothing."""
    frozen = partial(TenantQuotas, clock=lambda: 100.0)
    monkeypatch.setattr("scheduler_svc.server.TenantQuotas", frozen)
    limits = QuotaConfig({"acme": Quota(requests_per_min=3)})
    turn = inference_pb2.ChatMessage(role="user", content="hi")
    chat = inference_pb2.RenderChatRequest(chat=inference_pb2.ChatPrompt(messages=[turn]))
    text, ids = inference_pb2.TokenizeRequest(text="x"), inference_pb2.DetokenizeRequest()
    wrong = inference_pb2.DetokenizeRequest(token_ids=[1] * ((1 << 20) + 1))
    async with serving(spec, text_model, security=TENANTS, quotas=limits) as served:
        one, two = BEARER["one"], BEARER["two"]
        error = await error_of(served.tokenizer.Detokenize(wrong, metadata=one))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        calls: tuple[tuple[Any, Message], ...] = (
            (served.tokenizer.Tokenize, text),
            (served.tokenizer.Detokenize, ids),
            (served.tokenizer.RenderChat, chat),
        )
        for method, message in calls:
            await method(message, metadata=one)
        errors = [await error_of(method(message, metadata=one)) for method, message in calls]
        errors.append(await error_of(served.generation.Generate(request(), metadata=one)))
        for error in errors:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            info = detail(error, error_details_pb2.ErrorInfo)
            assert info.metadata["limit"] == "tenant_requests_per_min"
            assert detail(error, error_details_pb2.RetryInfo).retry_delay.seconds == 20
        for method, message in calls:
            await method(message, metadata=two)
        await served.models.ListModels(inference_pb2.ListModelsRequest(), metadata=one)
