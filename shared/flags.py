"""Flags of a process: each may also come from the environment, and the flag wins.

`--kv-memory` is QUIRE_KV_MEMORY there. What is wrong is one sentence, as a ConfigError.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, NoReturn, TypeVar

from shared.errors import ConfigError

Kind = TypeVar("Kind", bound=Enum)


class Flag(NamedTuple):
    """An option with a value."""

    name: str
    """With its dashes."""
    convert: Callable[[str], Any]
    """Makes the value of a text; raises ArgumentTypeError with what it must be, or ValueError."""
    default: Any
    """Strings are converted too; None stands for what the process finds out by itself."""
    help: str


class Switch(NamedTuple):
    """An option without a value; 1, true and yes set it in the environment."""

    name: str
    help: str


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see --help)")


def parse_flags(
    program: str,
    title: str,
    flags: Sequence[Flag | Switch],
    argv: Sequence[str],
    environ: Mapping[str, str],
) -> argparse.Namespace:
    """Each flag's value by its name without dashes; `title` is one sentence for --help.

    Raises ConfigError when a value is wrong or a flag is unknown.
    """
    parser = _Parser(
        prog=f"python -m {program}",
        description=f"{title} Each flag may come as QUIRE_<FLAG> in the environment.",
        allow_abbrev=False,
    )
    for flag in flags:
        variable = "QUIRE_" + flag.name.removeprefix("--").replace("-", "_").upper()
        if isinstance(flag, Switch):
            is_set = environ.get(variable, "").lower() in ("1", "true", "yes")
            parser.add_argument(flag.name, action="store_true", default=is_set, help=flag.help)
            continue
        # argparse converts string defaults by `type`, and reports them by the flag's name.
        value = environ.get(variable, flag.default)
        shown = "" if flag.default is None else f" [{flag.default}]"
        parser.add_argument(flag.name, type=flag.convert, default=value, help=flag.help + shown)
    return parser.parse_args(argv)


# -- values -----------------------------------------------------------------------------------


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be a number above 0")
    return value


def non_negative_float(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError("must be 0 or a number above it")
    return value


def one_of(choices: Sequence[str]) -> Callable[[str], str]:
    """A converter that takes nothing but `choices`."""

    def convert(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(choices)}")
        return text

    return convert


def member_of(kind: type[Kind]) -> Callable[[str], Kind]:
    """A converter to a member of `kind` by its value, a string."""
    by_value = one_of([member.value for member in kind])

    def convert(text: str) -> Kind:
        return kind(by_value(text))

    return convert
