"""One line per record, whatever is logged."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from shared import logs
from shared.errors import ConfigError


@pytest.fixture(autouse=True)
def _restore_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def log_everything() -> None:
    logger = logging.getLogger("quire.test")
    logger.debug("unseen")
    logger.info("hello %s", "wörld\nINFO forged: line\x1b[31m")
    try:
        raise ValueError("bad")
    except ValueError:
        logger.exception("failed")


def test_text_is_one_line_per_record(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("info", "text", "worker-0")
    log_everything()
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith(r" INFO worker-0 quire.test: hello wörld\nINFO forged: line\x1b[31m")
    assert first.startswith("20")
    assert "+00:00" in first
    assert "ValueError: bad" in second


def test_json_is_one_object_per_record(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("info", "json", "scheduler")
    log_everything()
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first["message"] == "hello wörld\nINFO forged: line\x1b[31m"
    assert (first["level"], first["process"], first["logger"]) == (
        "info",
        "scheduler",
        "quire.test",
    )
    assert "ValueError: bad" in second["error"]


def test_a_second_setup_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("debug", "text", "one")
    logs.setup("error", "text", "two")
    log_everything()
    assert [" two " in line for line in capsys.readouterr().err.splitlines()] == [True]


def test_unknown_levels_and_formats_are_refused() -> None:
    with pytest.raises(ConfigError, match="'loud'"):
        logs.setup("loud", "text", "x")
    with pytest.raises(ConfigError, match="'xml'"):
        logs.setup("info", "xml", "x")  # type: ignore[arg-type]
