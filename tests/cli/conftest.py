"""Runs the command in this process, against a fake server."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from cli.__main__ import main
from tests.cli.fake_server import FakeServer, running_fake_server


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


Quire = Callable[..., Ended]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running_fake_server() as fake:
        yield fake


@pytest.fixture
def quire(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Quire:
    """Runs `quire ARGUMENTS`; gives exit code, standard output and standard error."""
    for variable in ("QUIRE_SERVER", "QUIRE_ADMIN", "QUIRE_MODEL"):
        monkeypatch.delenv(variable, raising=False)

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["quire", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
            raise SystemExit(0)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Ended(int(ended.value.code or 0), captured.out, captured.err)

    return run
