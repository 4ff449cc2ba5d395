"""`quire explain`: what happened to a request, and why."""

from __future__ import annotations

from typing import Annotated

import grpc
import typer

from cli.call_errors import from_call_error
from cli.connection import TlsCaOption, TokenFileOption, connect, server_config
from protos.quire.admin.v1 import admin_pb2, admin_pb2_grpc
from quire_client import call_error

CALL_TIMEOUT_S = 10.0


def explain(
    request: Annotated[str, typer.Argument(help="the request's id")],
    admin: Annotated[
        str, typer.Option(envvar="QUIRE_ADMIN", help="host:port of the operator's API")
    ] = "127.0.0.1:50052",
    tls_ca: TlsCaOption = None,
    client_token_file: TokenFileOption = None,
) -> None:
    """Tell what happened to a request that lives or ended not long ago."""
    with connect(server_config(admin, tls_ca, client_token_file)) as client:
        try:
            story = admin_pb2_grpc.AdminServiceStub(client.channel).ExplainRequest(
                admin_pb2.ExplainRequestRequest(request_id=request),
                metadata=client.config.metadata,
                timeout=CALL_TIMEOUT_S,
            )
        except grpc.RpcError as error:
            raise from_call_error(call_error(error)) from None
    if story.num_dropped_events:
        print(f"({story.num_dropped_events} earlier events were not kept)")
    for event in story.events:
        which = f"[{event.sequence_index}] " if event.HasField("sequence_index") else ""
        print(f"{event.after_s:+10.3f} s  {which}{event.text}")
    if story.is_live:
        print("It has not ended.")
