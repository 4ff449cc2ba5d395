"""Who may call the gRPC ports: certificates, and tokens with the tenants whose they are."""

from __future__ import annotations

import argparse
import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from scheduler_svc.core.messages import DEFAULT_TENANT
from shared.errors import ConfigError
from shared.flags import Flag, Switch
from shared.secret_file import read_private_file

TENANT_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

SECURITY_FLAGS = (
    Flag("--tls-cert", Path, None, "PEM certificate chain of the gRPC ports"),
    Flag("--tls-key", Path, None, "PEM private key of --tls-cert"),
    Flag(
        "--tls-client-ca", Path, None, "PEM authorities that must have signed client certificates"
    ),
    Flag("--token-file", Path, None, "accepted bearer tokens, one a line: TOKEN or TENANT:TOKEN"),
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
    """Bearer tokens, any of which is good; empty asks for none."""


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
    tokens: tuple[ClientToken, ...] = ()
    if args.token_file is not None:
        lines = _read_file("--token-file", args.token_file, is_secret=True).splitlines()
        tokens = tuple(_client_token(line.strip()) for line in lines if line.strip())
    return SecurityConfig(
        tls_cert=args.tls_cert and _read_file("--tls-cert", args.tls_cert),
        tls_key=args.tls_key and _read_file("--tls-key", args.tls_key, is_secret=True),
        tls_client_ca=args.tls_client_ca and _read_file("--tls-client-ca", args.tls_client_ca),
        tokens=tokens,
    )


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
