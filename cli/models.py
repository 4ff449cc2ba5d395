"""`quire models`: what is served."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from cli.call_errors import from_call_error
from cli.connection import (
    DEFAULT_SERVER,
    ServerOption,
    TlsCaOption,
    TokenFileOption,
    connect,
    server_config,
)
from protos.quire.inference.v1 import inference_pb2
from quire_client import CallError, Client

CALL_TIMEOUT_S = 10.0


def models(
    server: ServerOption = DEFAULT_SERVER,
    tls_ca: TlsCaOption = None,
    client_token_file: TokenFileOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """List the models that a server serves."""
    with connect(server_config(server, tls_ca, client_token_file)) as client:
        try:
            served = client.models(timeout_s=CALL_TIMEOUT_S)
        except CallError as error:
            raise from_call_error(error) from None
    if as_json:
        print(json.dumps([_as_json(model) for model in served]))
        return
    table = Table("model", "architecture", "context", "vocabulary", "chat", box=None)
    for model in served:
        table.add_row(
            model.name,
            model.architecture,
            f"{model.context_length}",
            f"{model.vocab_size}",
            "yes" if model.has_chat_template else "no",
        )
    Console().print(table)


def served_model(client: Client, name: str) -> inference_pb2.Model:
    """The model of this name, or the only one for "". Raises CommandError."""
    try:
        return client.model(name, timeout_s=CALL_TIMEOUT_S)
    except CallError as error:
        raise from_call_error(error) from None


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
