"""Who may call the gRPC ports: certificates, and tokens with the tenants whose they are."""

from __future__ import annotations

import argparse
import ipaddress
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from scheduler_svc.core.messages import DEFAULT_TENANT
from shared.errors import ConfigError
from shared.flags import Flag, Switch
from shared.secret_file import check_secret, read_private_file

TENANT_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

OPERATOR = "operator"
"""Whose the tokens of the operator's port are; no tenant."""

SECURITY_FLAGS = (
    Flag("--tls-cert", Path, None, "PEM certificate chain of the gRPC ports"),
    Flag("--tls-key", Path, None, "PEM private key of --tls-cert"),
    Flag(
        "--tls-client-ca", Path, None, "PEM authorities that must have signed client certificates"
    ),
    Flag("--token-file", Path, None, "accepted bearer tokens, one a line: TOKEN or TENANT:TOKEN"),
    Flag("--admin-token-file", Path, None, "bearer tokens of the operator's port, one a line"),
    Switch("--share-prefixes", "let tenants take cached prefixes from each other"),
    Switch(
        "--allow-plaintext",
        "gRPC beyond loopback without TLS and tokens, as in a container whose port is "
        "published to loopback alone",
    ),
)


@dataclass(frozen=True, slots=True)
class ClientToken:
    """A bearer token, and whose it is."""

    secret: bytes
    tenant: str = DEFAULT_TENANT


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Who may call the gRPC ports."""

    tls_cert: bytes | None = None
    """PEM certificate chain; None serves plaintext."""
    tls_key: bytes | None = None
    """PEM private key of `tls_cert`."""
    tls_client_ca: bytes | None = None
    """PEM authorities; when set, clients must show a certificate that these signed."""
    tokens: tuple[ClientToken, ...] = ()
    """Clients' bearer tokens, any of which is good; empty asks for none."""
    admin_tokens: tuple[ClientToken, ...] = ()
    """Bearer tokens of the operator's port, where no client's is good; empty asks for none."""
    shares_prefixes: bool = False
    """Whether tenants take cached prefixes from each other, and so may learn what others ask."""

    @property
    def tenants(self) -> frozenset[str]:
        """Every tenant there is."""
        return frozenset({DEFAULT_TENANT, *(token.tenant for token in self.tokens)})


def _read_file(flag: str, path: Path, *, is_secret: bool = False) -> bytes:
    try:
        data = read_private_file(path) if is_secret else path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error.strerror}") from error
    if not data.strip():
        raise ConfigError(f"{flag}: {path} is empty")
    return data


def read_security(args: argparse.Namespace) -> SecurityConfig:
    """The certificates and tokens that SECURITY_FLAGS name; ConfigError for a bad file."""
    if (args.tls_cert is None) != (args.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key go together: give both or neither")
    if args.tls_client_ca is not None and args.tls_cert is None:
        raise ConfigError("--tls-client-ca needs --tls-cert and --tls-key")
    tokens = tuple(map(_client_token, _secret_lines("--token-file", args.token_file)))
    admin_tokens = tuple(
        ClientToken(check_secret(line, "in --admin-token-file"), OPERATOR)
        for line in _secret_lines("--admin-token-file", args.admin_token_file)
    )
    _check_tokens(tokens, admin_tokens)
    return SecurityConfig(
        tls_cert=args.tls_cert and _read_file("--tls-cert", args.tls_cert),
        tls_key=args.tls_key and _read_file("--tls-key", args.tls_key, is_secret=True),
        tls_client_ca=args.tls_client_ca and _read_file("--tls-client-ca", args.tls_client_ca),
        tokens=tokens,
        admin_tokens=admin_tokens,
        shares_prefixes=args.share_prefixes,
    )


def _secret_lines(flag: str, path: Path | None) -> list[bytes]:
    lines = [] if path is None else _read_file(flag, path, is_secret=True).splitlines()
    return [line.strip() for line in lines if line.strip()]


def _check_tokens(tokens: Collection[ClientToken], admin_tokens: Collection[ClientToken]) -> None:
    clients, operators = ({token.secret for token in some} for some in (tokens, admin_tokens))
    if len(clients) < len(tokens):
        raise ConfigError("--token-file has a token twice: it could name two tenants")
    if clients and not operators:
        raise ConfigError(
            "--token-file needs --admin-token-file: clients' tokens don't open the operator's port"
        )
    if clients & operators:
        raise ConfigError("a token of --admin-token-file is in --token-file too")


def _client_token(line: bytes) -> ClientToken:
    """TOKEN or TENANT:TOKEN; a colon can't be part of a bearer token (RFC 6750, section 2.1)."""
    name, separator, secret = line.rpartition(b":")
    if not separator:
        return ClientToken(line)
    tenant = name.decode("ascii", errors="replace").strip()
    if not TENANT_NAME.fullmatch(tenant) or not secret.strip():
        raise ConfigError("--token-file: a line with a colon must be TENANT:TOKEN")
    return ClientToken(secret.strip(), tenant)


def is_local(address: str) -> bool:
    """Whether only this machine can reach `address` ("host:port" or "unix:path")."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
