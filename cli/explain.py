"""`quire explain`: what happened to a request, and why."""

from __future__ import annotations

from typing import Annotated

import grpc
import typer

from cli.connection import Server, TlsCaOption, TokenFileOption
from cli.errors import from_rpc_error
from protos.quire.admin.v1 import admin_pb2, admin_pb2_grpc

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
    target = Server.from_options(admin, tls_ca, client_token_file)
    with target.connect() as channel:
        try:
            story = admin_pb2_grpc.AdminServiceStub(channel).ExplainRequest(
                admin_pb2.ExplainRequestRequest(request_id=request),
                metadata=target.metadata,
                timeout=CALL_TIMEOUT_S,
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
    if story.num_dropped_events:
        print(f"({story.num_dropped_events} earlier events were not kept)")
    for event in story.events:
        which = f"[{event.sequence_index}] " if event.HasField("sequence_index") else ""
        print(f"{event.after_s:+10.3f} s  {which}{event.text}")
    if story.is_live:
        print("It has not ended.")
