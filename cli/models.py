"""`quire models`: what is served."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import grpc
import typer
from rich.console import Console
from rich.table import Table

from cli.connection import DEFAULT_SERVER, Server, ServerOption, TlsCaOption, TokenFileOption
from cli.errors import from_rpc_error
from protos.quire.inference.v1 import inference_pb2, inference_pb2_grpc

CALL_TIMEOUT_S = 10.0
Metadata = Sequence[tuple[str, str]]


def models(
    server: ServerOption = DEFAULT_SERVER,
    tls_ca: TlsCaOption = None,
    client_token_file: TokenFileOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """List the models that a server serves."""
    target = Server.from_options(server, tls_ca, client_token_file)
    with target.connect() as channel:
        try:
            listed = inference_pb2_grpc.ModelServiceStub(channel).ListModels(
                inference_pb2.ListModelsRequest(),
                metadata=target.metadata,
                timeout=CALL_TIMEOUT_S,
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
    if as_json:
        print(json.dumps([_as_json(model) for model in listed.models]))
        return
    table = Table("model", "architecture", "context", "vocabulary", "chat", box=None)
    for model in listed.models:
        table.add_row(
            model.name,
            model.architecture,
            f"{model.context_length}",
            f"{model.vocab_size}",
            "yes" if model.has_chat_template else "no",
        )
    Console().print(table)


def served_model(channel: grpc.Channel, name: str, metadata: Metadata = ()) -> inference_pb2.Model:
    """The model of this name, or the only one for "". Raises CommandError."""
    try:
        response: inference_pb2.GetModelResponse = inference_pb2_grpc.ModelServiceStub(
            channel
        ).GetModel(
            inference_pb2.GetModelRequest(name=name),
            metadata=tuple(metadata),
            timeout=CALL_TIMEOUT_S,
        )
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
    return response.model


def _as_json(model: inference_pb2.Model) -> dict[str, object]:
    return {
        "name": model.name,
        "architecture": model.architecture,
        "context_length": model.context_length,
        "vocab_size": model.vocab_size,
        "eos_token_ids": list(model.eos_token_ids),
        "has_chat_template": model.has_chat_template,
        "fingerprint": model.fingerprint,
    }
