"""Secrets in files that only their owner reads, and the shared secret of the worker plane.

python -m shared.secret_file PATH     creates PATH with a random secret unless it is there
"""

from __future__ import annotations

import os
import secrets
import stat
import sys
from pathlib import Path

from shared.errors import ConfigError

MIN_SECRET_BYTES = 16
NUM_RANDOM_BYTES = 32
MAX_FILE_BYTES = 4096
SECRET_MOUNTS = ("/run/secrets/", "/var/run/secrets/")
"""Where container engines mount secrets, readable by all who are in the container: the container
itself keeps others out."""


def read_private_file(path: Path | str, max_bytes: int = -1) -> bytes:
    """The content of a file that others neither read nor write, at most `max_bytes` + 1 of it.

    Its group may read it if root owns it, so that root can hand a secret to a service. Raises
    OSError when it can't be read, and ConfigError when others could.
    """
    with open(path, "rb") as file:
        _check_private(path, os.fstat(file.fileno()))
        return file.read(-1 if max_bytes < 0 else max_bytes + 1)


def _check_private(path: Path | str, status: os.stat_result) -> None:
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"other users may write to {path}; run: chmod 600 {path}")
    readers = stat.S_IROTH if status.st_uid == 0 else stat.S_IRGRP | stat.S_IROTH
    if status.st_mode & readers and not os.path.realpath(path).startswith(SECRET_MOUNTS):
        raise ConfigError(f"other users may read {path}; run: chmod 600 {path}")


def check_secret(secret: bytes, source: str) -> bytes:
    """The secret itself; ConfigError when it is empty or short. `source` says where it is from."""
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"the secret {source} has {len(secret)} bytes and needs at least {MIN_SECRET_BYTES}; "
            "python -m shared.secret_file PATH makes one"
        )
    return secret


def read_secret(path: Path | str) -> bytes:
    """The secret in `path` without white space around it.

    Raises ConfigError when the file is missing, unreadable or open to others, or its secret empty
    or short.
    """
    try:
        content = read_private_file(path, MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read the secret file {path}: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"the secret file {path} is larger than {MAX_FILE_BYTES} bytes")
    return check_secret(content.strip(), f"in {path}")


def create_secret(path: Path | str) -> bool:
    """Write a random secret to `path`, mode 0600; False when the file is there already.

    The file appears whole or not at all, and of several creators at once one wins: the secret is
    written beside it and then linked under its name, which fails where that name exists.
    """
    path = Path(path)
    if path.exists():
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_hex(NUM_RANDOM_BYTES).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, path)
        except FileExistsError:  # another creator was faster
            return False
        finally:
            os.unlink(draft)
    except OSError as error:
        raise ConfigError(f"cannot create the secret file {path}: {error.strerror}") from error
    return True


def main(arguments: list[str]) -> int:
    """Create the file named by the one argument; 0 when a sound secret is there afterwards."""
    if len(arguments) != 1:
        print("usage: python -m shared.secret_file PATH", file=sys.stderr)
        return 2
    path = arguments[0]
    try:
        created = create_secret(path)
        read_secret(path)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"created {path}" if created else f"{path} is there already")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
