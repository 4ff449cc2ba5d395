"""How the command reaches a server, and the options that say so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import grpc
import typer

from cli.errors import EXIT_USAGE, CommandError, NoServer
from quire_client import Client, ClientConfig
from shared.errors import ConfigError
from shared.secret_file import read_private_file

CONNECT_TIMEOUT_S = 5.0

ServerOption = Annotated[
    str, typer.Option("--server", envvar="QUIRE_SERVER", help="host:port of the gRPC API")
]
TlsCaOption = Annotated[
    Path | None,
    typer.Option("--tls-ca", envvar="QUIRE_TLS_CA", help="PEM authorities; asks for TLS"),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        "--client-token-file",
        envvar="QUIRE_CLIENT_TOKEN_FILE",
        help="file with the bearer token to show",
    ),
]
ModelOption = Annotated[str, typer.Option("--model", help="model name; default: the only one")]
DEFAULT_SERVER = "127.0.0.1:50051"


def server_config(address: str, tls_ca: Path | None, token_file: Path | None) -> ClientConfig:
    """What the options say. Raises CommandError when a file can't be read or is no good."""
    token = None
    if token_file is not None:
        token = _read(token_file, read_private_file).decode("ascii", errors="replace").strip()
    return ClientConfig(
        address,
        token=token,
        tls_ca=None if tls_ca is None else _read(tls_ca),
        max_attempts=1,  # who sits at the terminal hears at once what is wrong
    )


def connect(config: ClientConfig) -> Client:
    """A connected client. Raises NoServer when nothing answers in time."""
    client = Client(config)
    try:
        grpc.channel_ready_future(client.channel).result(timeout=CONNECT_TIMEOUT_S)
    except grpc.FutureTimeoutError:
        client.close()
        raise NoServer(config.address) from None
    return client


def _read(path: Path, read: Callable[[Path], bytes] = Path.read_bytes) -> bytes:
    try:
        return read(path)
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}", EXIT_USAGE) from error
    except ConfigError as error:
        raise CommandError(str(error), EXIT_USAGE) from error
