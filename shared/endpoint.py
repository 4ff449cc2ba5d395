"""The worker plane's address, tcp://HOST:PORT or ipc:///ABSOLUTE/PATH, and who may get there."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError

MAX_IPC_PATH_BYTES = 107  # sun_path of Linux without its final zero
PROBE_TIMEOUT_S = 0.5
MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A parsed address; exactly one of `host` and `path` is set."""

    text: str
    host: str | None
    path: Path | None

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Raises ConfigError for anything but the two forms above."""
        scheme, _, address = text.partition("://")
        if scheme == "ipc" and address.startswith("/"):
            if len(os.fsencode(address)) > MAX_IPC_PATH_BYTES:
                raise ConfigError(f"the path of {text} is longer than {MAX_IPC_PATH_BYTES} bytes")
            return cls(text, None, Path(address))
        host, colon, port = address.rpartition(":")
        if scheme == "tcp" and host and colon and (port == "*" or _is_port(port)):
            return cls(text, host.strip("[]"), None)
        raise ConfigError(f"{text!r} should be tcp://HOST:PORT or ipc:///ABSOLUTE/PATH")

    @property
    def is_local(self) -> bool:
        """Whether only processes of this machine can get there."""
        if self.host is None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False  # a name: it may mean any machine

    def require_secret(self, secret: bytes | None) -> None:
        """Raises ConfigError for an address beyond this machine without a secret."""
        if secret is None and not self.is_local:
            raise ConfigError(
                f"{self.text} is reachable from other machines and needs a shared secret"
            )

    def prepare_to_bind(self) -> None:
        """Make the folder of an ipc socket, private to this user, and remove a stale socket.

        Raises ConfigError when others may enter the folder, when a process listens there, or when
        the path is something else than a socket.
        """
        if self.path is None:
            return
        folder = self.path.parent
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
            if status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise ConfigError(
                    f"the folder {folder} of the socket must belong to this user with mode 0700"
                )
            if self.path.exists():
                _remove_stale_socket(self.path)
        except OSError as error:
            raise ConfigError(f"cannot listen at {self.text}: {error.strerror}") from error


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text) <= MAX_PORT


def _remove_stale_socket(path: Path) -> None:
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"{path} is there and is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:  # the process that bound it is gone
            path.unlink()
            return
        except TimeoutError:  # alive, with a full queue
            pass
    raise ConfigError(f"another process listens at {path}")
