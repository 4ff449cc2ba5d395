"""Addresses are checked before anything listens, and what others can reach needs a secret."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from shared.endpoint import Endpoint
from shared.errors import ConfigError


@pytest.mark.parametrize(
    "text",
    ["", "tcp://", "tcp://host", "tcp://:5555", "tcp://h:70000", "tcp://h:-1", "tcp://h:x",
     "ipc://relative", "ipc:///" + "x" * 200, "udp://h:1", "inproc://x", "127.0.0.1:5555"],
)  # fmt: skip
def test_malformed_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Endpoint.parse(text)


@pytest.mark.parametrize(
    ("text", "is_local"),
    [
        ("ipc:///run/quire/workers", True),
        ("tcp://127.0.0.1:0", True),
        ("tcp://127.8.8.8:*", True),
        ("tcp://[::1]:5555", True),
        ("tcp://localhost:5555", True),
        ("tcp://0.0.0.0:5555", False),
        ("tcp://*:5555", False),
        ("tcp://[::]:5555", False),
        ("tcp://10.0.0.7:5555", False),
        ("tcp://scheduler:5555", False),
    ],
)
def test_what_other_machines_can_reach_needs_a_secret(text: str, is_local: bool) -> None:
    endpoint = Endpoint.parse(text)
    endpoint.require_secret(b"x" * 32)
    if is_local:
        endpoint.require_secret(None)
        return
    with pytest.raises(ConfigError, match="needs a shared secret"):
        endpoint.require_secret(None)


def test_the_folder_of_a_socket_is_made_private(tmp_path: Path) -> None:
    path = tmp_path / "run" / "workers"
    Endpoint.parse(f"ipc://{path}").prepare_to_bind()
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(ConfigError, match="0700"):
        Endpoint.parse(f"ipc://{tmp_path}/open/workers").prepare_to_bind()


def test_a_stale_socket_is_removed_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    endpoint = Endpoint.parse(f"ipc://{path}")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(ConfigError, match="another process listens"):
            endpoint.prepare_to_bind()
        assert path.exists()
    endpoint.prepare_to_bind()
    assert not path.exists()


def test_another_file_in_the_way_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="no socket"):
        Endpoint.parse(f"ipc://{path}").prepare_to_bind()
    assert path.read_text() == "precious"
