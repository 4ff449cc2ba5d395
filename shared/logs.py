"""Logging of a process: one line per record on stderr, as text or as JSON.

Callers log events and names, never prompts, answers, tokens of clients or secrets.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

from shared.errors import ConfigError

LogFormat = Literal["text", "json"]
LEVELS = ("debug", "info", "warning", "error")


def setup(level: str, format: LogFormat, process: str) -> None:
    """Send every logger of this process to stderr; replaces an earlier setup.

    `process` names the process in each line. Raises ConfigError for another level or format.
    """
    if level.lower() not in LEVELS:
        raise ConfigError(f"the log level {level!r} should be one of {', '.join(LEVELS)}")
    if format not in ("text", "json"):
        raise ConfigError(f"the log format {format!r} should be text or json")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLine(process) if format == "json" else _TextLine(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class _TextLine(logging.Formatter):
    """2026-01-31T12:00:00.123+00:00 INFO worker-0 quire.worker: message"""

    def __init__(self, process: str) -> None:
        name = process.replace("%", "%%")
        super().__init__(f"%(asctime)s %(levelname)s {name} %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return _utc(record)

    def format(self, record: logging.LogRecord) -> str:
        return _one_line(super().format(record))


class _JsonLine(logging.Formatter):
    """An object with time (UTC), level, process, logger, message and, where there is one, error."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _utc(record),
            "level": record.levelname.lower(),
            "process": self.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _utc(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _one_line(text: str) -> str:
    """Line breaks and other control characters escaped, so that nobody can forge a line."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
