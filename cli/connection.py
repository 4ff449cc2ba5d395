"""How the command reaches a server: address, TLS, token; and the options that name them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import grpc
import typer

from cli.errors import EXIT_USAGE, CommandError, NoServer
from shared.errors import ConfigError
from shared.secret_file import read_private_file

CONNECT_TIMEOUT_S = 5.0
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
)

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


@dataclass(frozen=True, slots=True)
class Server:
    """One server and how to show oneself there."""

    address: str
    tls_ca: bytes | None = None
    token: str | None = None

    @classmethod
    def from_options(cls, address: str, tls_ca: Path | None, token_file: Path | None) -> Server:
        token = None
        if token_file is not None:
            token = _read(token_file, read_private_file).decode("ascii", errors="replace").strip()
        return cls(address, None if tls_ca is None else _read(tls_ca), token)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Call metadata that carries the token."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    def connect(self) -> grpc.Channel:
        """A connected channel. Raises NoServer when nothing answers in time."""
        channel = (
            grpc.insecure_channel(self.address, CHANNEL_OPTIONS)
            if self.tls_ca is None
            else grpc.secure_channel(self.address, self._credentials(), CHANNEL_OPTIONS)
        )
        try:
            grpc.channel_ready_future(channel).result(timeout=CONNECT_TIMEOUT_S)
        except grpc.FutureTimeoutError:
            channel.close()
            raise NoServer(self.address) from None
        return channel

    def connect_async(self) -> grpc.aio.Channel:
        """A channel for asyncio, not yet connected."""
        if self.tls_ca is None:
            return grpc.aio.insecure_channel(self.address, CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(self.address, self._credentials(), CHANNEL_OPTIONS)

    def _credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.tls_ca)


def _read(path: Path, read: Callable[[Path], bytes] = Path.read_bytes) -> bytes:
    try:
        return read(path)
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}", EXIT_USAGE) from error
    except ConfigError as error:
        raise CommandError(str(error), EXIT_USAGE) from error
