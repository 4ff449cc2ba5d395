"""How a client reaches a server and shows itself there; the same for both clients."""

from __future__ import annotations

import json
from dataclasses import dataclass

import grpc

MAX_MESSAGE_BYTES = 64 << 20
SERVICES = ("GenerationService", "TokenizerService", "ModelService")


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """One server, and what it wants to see."""

    address: str = "127.0.0.1:50051"
    """host:port, or unix:PATH."""
    token: str | None = None
    """Bearer token; it goes along with each call, so use TLS beyond this machine."""
    tls_ca: bytes | None = None
    """PEM authorities that must have signed the server's certificate; with it the link is TLS."""
    tls_cert: bytes | None = None
    """PEM certificate chain to show, where the server asks for one."""
    tls_key: bytes | None = None
    """PEM private key of `tls_cert`."""
    max_attempts: int = 4
    """How often a call is tried in all while the server answers UNAVAILABLE; 1 tries once. gRPC
    does this by itself, and never once a stream has delivered a message, so that nothing is
    delivered twice."""
    initial_backoff_s: float = 0.2
    """Seconds before the second attempt; each later wait is twice as long, drawn at random below
    that."""
    max_backoff_s: float = 5.0

    def __post_init__(self) -> None:
        assert self.max_attempts >= 1
        assert 0 < self.initial_backoff_s <= self.max_backoff_s
        assert (self.tls_cert is None) == (self.tls_key is None), "certificate and key go together"
        assert self.tls_cert is None or self.tls_ca is not None, "a certificate needs tls_ca"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of each call."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    def channel(self) -> grpc.Channel:
        """A channel that connects when it is used."""
        if self.tls_ca is None:
            return grpc.insecure_channel(self.address, self._options())
        return grpc.secure_channel(self.address, self._credentials(), self._options())

    def aio_channel(self) -> grpc.aio.Channel:
        """The same for asyncio; make it on the loop that uses it."""
        if self.tls_ca is None:
            return grpc.aio.insecure_channel(self.address, self._options())
        return grpc.aio.secure_channel(self.address, self._credentials(), self._options())

    def _credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.tls_ca, self.tls_key, self.tls_cert)

    def _options(self) -> tuple[tuple[str, object], ...]:
        sizes = ("grpc.max_receive_message_length", "grpc.max_send_message_length")
        options: list[tuple[str, object]] = [(name, MAX_MESSAGE_BYTES) for name in sizes]
        if self.max_attempts > 1:
            options.append(("grpc.service_config", json.dumps(self._service_config())))
        return tuple(options)

    def _service_config(self) -> dict[str, object]:
        policy = {
            "maxAttempts": self.max_attempts,
            "initialBackoff": f"{self.initial_backoff_s}s",
            "maxBackoff": f"{self.max_backoff_s}s",
            "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE"],
        }
        names = [{"service": f"quire.inference.v1.{service}"} for service in SERVICES]
        return {"methodConfig": [{"name": names, "retryPolicy": policy}]}
