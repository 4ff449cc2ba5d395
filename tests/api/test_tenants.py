"""Tenants share the machine and nothing else."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from protos.quire.admin.v1 import admin_pb2
from scheduler_svc.config import parse_config
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.security_config import ClientToken, SecurityConfig
from scheduler_svc.tenancy import Tenancy
from scheduler_svc.text.tokenizer import TextModel
from shared.errors import ConfigError
from shared.model_spec import ModelSpec
from tests.api.fake_worker import joined
from tests.api.serving import OpenStream, answer, error_of, opened, request, serving
from tests.api.test_config import MODEL

ACME, OTHER, OPERATOR = (
    (("authorization", f"Bearer {token}"),) for token in ("one", "two", "the operator's")
)
TOKENS = (ClientToken(b"one", "acme"), ClientToken(b"two", "other"))
ADMIN_TOKENS = (ClientToken(b"the operator's", "operator"),)


@pytest.mark.parametrize("shares", [False, True])
async def test_cached_prefixes_are_the_tenants_own_unless_the_operator_shares_them(
    spec: ModelSpec, text_model: TextModel, shares: bool
) -> None:
    """FIELD-FAILURES part 4: cached prefixes visible by timing or counts across tenants."""
    security = SecurityConfig(tokens=TOKENS, shares_prefixes=shares)
    async with serving(spec, text_model, security=security) as served, joined(served.worker()):
        await served.wait_status(1)
        cached = [
            (
                await answer(served, request("x" * 100, cache_salt=salt), tenant)
            ).started.num_cached_tokens
            for tenant, salt in [(ACME, ""), (ACME, ""), (OTHER, ""), (OTHER, "s"), (ACME, "s")]
        ]
    assert cached == ([0, 96, 96, 0, 96] if shares else [0, 96, 0, 0, 0])


async def test_each_server_draws_its_own_key_for_block_hashes(
    spec: ModelSpec, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FIELD-FAILURES part 4: predictable prefix hashes."""
    keys: list[bytes] = []

    def make(config: SchedulerConfig, hash_key: bytes) -> Scheduler:
        keys.append(hash_key)
        return Scheduler(config, hash_key)

    monkeypatch.setattr("scheduler_svc.server.Scheduler", make)
    for _ in range(2):
        async with serving(spec, text_model):
            pass
    assert keys[0] != keys[1]
    assert [len(key) for key in keys] == [32, 32]


def test_no_tenant_and_salt_are_mistaken_for_another() -> None:
    apart = Tenancy(has_tenants=True)
    salts = {apart.cache_salt(tenant, salt) for tenant in ("a", "aa") for salt in ("", "a", "aa")}
    assert len(salts) == 6
    assert apart.request_id("a", "b/c") != apart.request_id("a.b", "c")
    assert Tenancy().request_id("default", "mine") == "mine"


async def test_request_ids_are_the_tenants_own(spec: ModelSpec, text_model: TextModel) -> None:
    """An id of another tenant's is neither in the way nor told."""
    security = SecurityConfig(tokens=TOKENS, admin_tokens=ADMIN_TOKENS)
    async with serving(spec, text_model, security=security) as served:
        worker = served.worker()
        async with joined(worker):
            await served.wait_status(1)
            worker.hold()
            named = request(request_id="mine")
            streams = [await opened(served, named, ACME), OpenStream(served, named, OTHER)]
            await served.wait_live(2)
            twice = await error_of(served.generation.Generate(named, metadata=ACME))
            listed = await served.admin.ListRequests(
                admin_pb2.ListRequestsRequest(), metadata=OPERATOR
            )
            worker.release()
            answers = [await stream.rest() for stream in streams]
    assert twice.code() is grpc.StatusCode.ALREADY_EXISTS
    assert [live.request_id for live in listed.requests] == ["acme/mine", "other/mine"]
    assert [got.started.request_id for got in answers] == ["mine", "mine"]


async def test_the_operators_port_takes_the_operators_tokens_alone(
    spec: ModelSpec, text_model: TextModel
) -> None:
    security = SecurityConfig(tokens=TOKENS, admin_tokens=ADMIN_TOKENS)
    async with serving(spec, text_model, security=security) as served:
        ask = admin_pb2.ListWorkersRequest()
        assert not (await served.admin.ListWorkers(ask, metadata=OPERATOR)).workers
        for metadata in (None, ACME):
            error = await error_of(served.admin.ListWorkers(ask, metadata=metadata))
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        error = await error_of(served.generation.Generate(request(), metadata=OPERATOR))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED


def private(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def test_the_operators_tokens_come_from_a_file_of_their_own(tmp_path: Path) -> None:
    clients = private(tmp_path / "clients", "acme:" + "c" * 20)
    operators = private(tmp_path / "operators", "o" * 16 + "\n" + "p" * 16)
    flags = [*MODEL, "--token-file", clients, "--admin-token-file", operators]
    security = parse_config(flags, {}).security
    assert [token.secret for token in security.admin_tokens] == [b"o" * 16, b"p" * 16]
    assert not security.shares_prefixes
    assert parse_config([*flags, "--share-prefixes"], {}).security.shares_prefixes


@pytest.mark.parametrize(
    ("operators", "words"),
    [
        (None, "--token-file needs --admin-token-file"),
        ("", "empty"),
        ("short", "at least 16"),
        ("c" * 20, "is in --token-file too"),
    ],
)
def test_weak_operators_tokens_are_refused(
    tmp_path: Path, operators: str | None, words: str
) -> None:
    flags = [*MODEL, "--token-file", private(tmp_path / "clients", "acme:" + "c" * 20)]
    if operators is not None:
        flags += ["--admin-token-file", private(tmp_path / "operators", operators)]
    with pytest.raises(ConfigError, match=words):
        parse_config(flags, {})
