"""The `quire` command."""

from __future__ import annotations

import sys

import typer

from cli.bench import bench
from cli.chat import chat
from cli.errors import CommandError
from cli.explain import explain
from cli.generate import generate
from cli.models import models
from cli.serve import serve

app = typer.Typer(
    name="quire",
    help="Serve a large language model, and talk to it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (serve, chat, generate, models, explain, bench):
    app.command()(command)


def main() -> None:
    """Runs the command line; every failure ends in one sentence on standard error.

    Wrong usage and Ctrl-C are typer's to tell; both without a traceback.
    """
    try:
        app()
    except CommandError as error:
        print(f"quire: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
