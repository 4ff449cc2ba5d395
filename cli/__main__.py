"""The `quire` command."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import typer

from cli.errors import CommandError

COMMANDS = ("serve", "chat", "generate", "models", "explain", "bench")
"""Each is the function of that name in the module of that name."""


def command_line(arguments: Sequence[str]) -> typer.Typer:
    """With the command that comes first in `arguments` alone, or with all where none does: what
    they import takes long, and `quire serve` is to start its processes at once."""
    app = typer.Typer(
        name="quire",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback(help="Serve a large language model, and talk to it.")(lambda: None)
    for name in [name for name in COMMANDS if name in arguments[:1]] or COMMANDS:
        app.command()(getattr(importlib.import_module(f"cli.{name}"), name))
    return app


def main() -> None:
    """Runs the command line; every failure ends in one sentence on standard error.

    Wrong usage and Ctrl-C are typer's to tell; both without a traceback.
    """
    try:
        command_line(sys.argv[1:])()
    except CommandError as error:
        print(f"quire: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
