"""A secret is made once, for its owner alone, and never empty."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from threading import Barrier, Thread

import pytest

from shared import secret_file
from shared.errors import ConfigError
from shared.secret_file import MIN_SECRET_BYTES, create_secret, main, read_secret


def test_a_secret_is_created_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "secret"
    assert create_secret(path)
    secret = read_secret(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not create_secret(path)
    assert read_secret(path) == secret
    assert len(secret) >= 32
    assert [file.name for file in path.parent.iterdir()] == ["secret"]


def test_secrets_differ(tmp_path: Path) -> None:
    for name in ("a", "b"):
        create_secret(tmp_path / name)
    assert read_secret(tmp_path / "a") != read_secret(tmp_path / "b")


def test_of_several_creators_at_once_one_wins(tmp_path: Path) -> None:
    path, barrier = tmp_path / "secret", Barrier(8)
    outcomes: list[bool] = []
    seen: list[bytes] = []

    def create() -> None:
        barrier.wait()
        outcomes.append(create_secret(path))
        seen.append(read_secret(path))

    threads = [Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(outcomes) == 1
    assert set(seen) == {read_secret(path)}


@pytest.mark.parametrize("content", [b"", b" \n", b"x" * (MIN_SECRET_BYTES - 1), b"x" * 5000])
def test_empty_short_and_huge_secrets_are_refused(tmp_path: Path, content: bytes) -> None:
    """FIELD-FAILURES: an empty default secret that switched the check off."""
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="secret"):
        read_secret(path)
    assert main([str(path)]) == 2


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        read_secret(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot create"):
        create_secret(tmp_path / "file" / "secret")


def test_white_space_around_a_secret_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"\n  " + b"k" * 20 + b"\r\n")
    path.chmod(0o600)
    assert read_secret(path) == b"k" * 20


def test_the_command_creates_and_keeps_and_never_prints_the_secret(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    command = [sys.executable, "-m", "shared.secret_file", str(path)]
    outputs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in "ab"]
    assert "created" in outputs[0].stdout
    assert "already" in outputs[1].stdout
    assert read_secret(path).decode() not in outputs[0].stdout + outputs[1].stdout
    assert main([]) == 2


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620, 0o660, 0o644, 0o666])
def test_a_file_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    """FIELD-FAILURES, part 4: secrets that are none."""
    path = tmp_path / "secret"
    path.write_bytes(b"k" * 20)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"chmod 600 {path}$"):
        read_secret(path)
    path.chmod(0o400)
    assert read_secret(path) == b"k" * 20


def test_roots_file_may_be_read_by_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"k" * 20)
    path.chmod(0o640)
    status = path.stat()
    for owner, is_private in ((0, True), (1000, False)):
        changed = os.stat_result((*status[:4], owner, *status[5:]))
        monkeypatch.setattr(os, "fstat", lambda _, changed=changed: changed)
        if is_private:
            assert read_secret(path) == b"k" * 20
        else:
            with pytest.raises(ConfigError, match="may read"):
                read_secret(path)


def test_a_mounted_secret_may_be_readable_but_not_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Container engines mount secrets with mode 0444, links and all."""
    mount = tmp_path / "run" / "secrets"
    mount.mkdir(parents=True)
    monkeypatch.setattr(secret_file, "SECRET_MOUNTS", (f"{mount}/",))
    (mount / "data").write_bytes(b"k" * 20)
    (mount / "data").chmod(0o444)
    (mount / "secret").symlink_to("data")
    assert read_secret(mount / "secret") == b"k" * 20
    (mount / "data").chmod(0o666)
    with pytest.raises(ConfigError, match="may write"):
        read_secret(mount / "secret")
