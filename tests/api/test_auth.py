"""Tokens and TLS at the gRPC ports."""

from __future__ import annotations

import hmac
import shutil
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.quire.admin.v1 import admin_pb2
from protos.quire.inference.v1 import inference_pb2, inference_pb2_grpc
from quire_client import AsyncClient, ClientConfig
from scheduler_svc.core.messages import NewRequest
from scheduler_svc.security_config import ClientToken, SecurityConfig
from scheduler_svc.servicers.auth import TokenBook
from scheduler_svc.text.tokenizer import TextModel
from shared.errors import DeadlineExceeded
from shared.model_spec import ModelSpec
from tests.api.serving import NOT_SERVING, error_of, request, serving

OPENSSL = shutil.which("openssl")
LIST = inference_pb2.ListModelsRequest()


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        (("authorization", "Bearer "),),
        (("authorization", "Bearer wrong"),),
        (("authorization", "one"),),
        (("authorization", "Basic one"),),
    ],
)
async def test_calls_without_a_good_token_are_refused(
    spec: ModelSpec, text_model: TextModel, metadata: Any
) -> None:
    tokens = (ClientToken(b"one"), ClientToken(b"two", "acme"))
    admin_tokens = (ClientToken(b"three", "operator"),)
    security = SecurityConfig(tokens=tokens, admin_tokens=admin_tokens)
    async with serving(spec, text_model, security=security) as served:
        calls = [
            served.models.ListModels(LIST, metadata=metadata),
            served.generation.Generate(request(), metadata=metadata),
            served.admin.ListWorkers(admin_pb2.ListWorkersRequest(), metadata=metadata),
        ]
        for call in calls:
            assert (await error_of(call)).code() is grpc.StatusCode.UNAUTHENTICATED


def test_every_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """FIELD-FAILURES part 4: secrets compared in variable time."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(given: bytes, known: bytes) -> bool:
        compared.append((given, known))
        return given == known

    monkeypatch.setattr(hmac, "compare_digest", compare)
    book = TokenBook((ClientToken(b"one", "a"), ClientToken(b"two", "b"), ClientToken(b"six", "c")))
    for given, tenant in ((b"one", "a"), (b"two", "b"), (b"none", None)):
        compared.clear()
        assert book.tenant_of((("authorization", b"Bearer " + given),)) == tenant
        assert compared == [(given, known) for known in (b"one", b"two", b"six")]


@pytest.mark.parametrize("token", ["one", "two"])
async def test_each_token_is_good_and_health_needs_none(
    spec: ModelSpec, text_model: TextModel, token: str
) -> None:
    security = SecurityConfig(tokens=(ClientToken(b"one"), ClientToken(b"two", "acme")))
    async with serving(spec, text_model, security=security) as served:
        metadata = (("authorization", f"Bearer {token}"),)
        assert (await served.models.ListModels(LIST, metadata=metadata)).models
        error = await error_of(served.generation.Generate(request(), metadata=metadata))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert await served.status() == NOT_SERVING


async def test_a_request_carries_its_tenant_and_deadline_to_the_core(
    spec: ModelSpec, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    security = SecurityConfig(tokens=(ClientToken(b"one"), ClientToken(b"two", "acme")))
    async with serving(spec, text_model, security=security) as served:
        seen: list[NewRequest] = []

        def refuse(new: NewRequest, now: float) -> None:
            seen.append(new)
            raise DeadlineExceeded("too late")

        monkeypatch.setattr(served.server.engine.scheduler, "submit", refuse)
        for token in ("one", "two"):
            metadata = (("authorization", f"Bearer {token}"),)
            call = served.generation.Generate(request(), metadata=metadata, timeout=60)
            assert (await error_of(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await error_of(served.generation.Generate(request(), metadata=metadata))
    assert [new.tenant for new in seen] == ["default", "acme", "acme"]
    assert all(new.deadline_s is not None and 30 < new.deadline_s < 61 for new in seen[:2])
    assert seen[2].deadline_s is None


def certificate(folder: Path, name: str) -> tuple[bytes, bytes]:
    """A self-signed certificate for localhost and its key, in PEM."""
    assert OPENSSL is not None
    key, cert = folder / f"{name}.key", folder / f"{name}.crt"
    make = [OPENSSL, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    make += ["-nodes", "-days", "2", "-subj", f"/CN={name}"]
    make += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(make, check=True, capture_output=True)
    return cert.read_bytes(), key.read_bytes()


@pytest.mark.skipif(OPENSSL is None, reason="makes its certificates with openssl")
async def test_mutual_tls_lets_in_known_certificates_alone(
    spec: ModelSpec, text_model: TextModel, tmp_path: Path
) -> None:
    cert, key = certificate(tmp_path, "server")
    client_cert, client_key = certificate(tmp_path, "client")
    security = SecurityConfig(tls_cert=cert, tls_key=key, tls_client_ca=client_cert)
    client = grpc.ssl_channel_credentials(cert, client_key, client_cert)
    options = [("grpc.ssl_target_name_override", "localhost")]
    async with serving(spec, text_model, security=security) as served:
        address = served.server.address
        for credentials, works in ((client, True), (grpc.ssl_channel_credentials(cert), False)):
            async with grpc.aio.secure_channel(address, credentials, options) as channel:
                call = inference_pb2_grpc.ModelServiceStub(channel).ListModels(LIST, timeout=5)
                if works:
                    assert (await call).models
                else:
                    assert (await error_of(call)).code() is grpc.StatusCode.UNAVAILABLE
        config = ClientConfig(
            f"localhost:{address.rpartition(':')[2]}",
            tls_ca=cert,
            tls_cert=client_cert,
            tls_key=client_key,
        )
        async with AsyncClient(config) as of_ours:
            assert await of_ours.models(timeout_s=5)
        plain = await error_of(served.models.ListModels(LIST, timeout=5))
    assert plain.code() is grpc.StatusCode.UNAVAILABLE
