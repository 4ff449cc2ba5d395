"""Tokens and TLS at the gRPC ports."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from protos.quire.admin.v1 import admin_pb2
from protos.quire.inference.v1 import inference_pb2
from scheduler_svc.config import SecurityConfig
from scheduler_svc.text.tokenizer import TextModel
from shared.model_spec import ModelSpec
from tests.api.serving import NOT_SERVING, error_of, request, serving

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
    security = SecurityConfig(tokens=(b"one", b"two"))
    async with serving(spec, text_model, security=security) as served:
        calls = [
            served.models.ListModels(LIST, metadata=metadata),
            served.generation.Generate(request(), metadata=metadata),
            served.admin.ListWorkers(admin_pb2.ListWorkersRequest(), metadata=metadata),
        ]
        for call in calls:
            assert (await error_of(call)).code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("token", ["one", "two"])
async def test_each_token_is_good_and_health_needs_none(
    spec: ModelSpec, text_model: TextModel, token: str
) -> None:
    security = SecurityConfig(tokens=(b"one", b"two"))
    async with serving(spec, text_model, security=security) as served:
        metadata = (("authorization", f"Bearer {token}"),)
        assert (await served.models.ListModels(LIST, metadata=metadata)).models
        error = await error_of(served.generation.Generate(request(), metadata=metadata))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert await served.status() == NOT_SERVING
