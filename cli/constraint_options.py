"""The options that say what an answer must be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cli.errors import EXIT_USAGE, CommandError
from protos.quire.inference.v1 import inference_pb2

JsonSchemaOption = Annotated[
    Path | None, typer.Option("--json-schema", help="file with a JSON Schema that it fulfils")
]
JsonObjectOption = Annotated[bool, typer.Option("--json-object", help="some JSON object")]
RegexOption = Annotated[str | None, typer.Option("--regex", help="pattern that it matches whole")]
ChoiceOption = Annotated[
    list[str] | None, typer.Option("--choice", help="one of these texts; give it several times")
]
GrammarOption = Annotated[
    Path | None, typer.Option("--grammar", help="file with a Lark grammar that it is a text of")
]


def set_constraint(
    request: inference_pb2.GenerateRequest,
    *,
    json_schema: Path | None,
    json_object: bool,
    regex: str | None,
    choice: Sequence[str] | None,
    grammar: Path | None,
) -> None:
    """Puts what is given into `request`. Raises CommandError for two of them, and for a file that
    can't be read."""
    texts = (json_schema, regex, grammar)
    if sum(text is not None for text in texts) + json_object + bool(choice) > 1:
        raise CommandError(
            "give one of --json-schema, --json-object, --regex, --choice and --grammar", EXIT_USAGE
        )
    if json_schema is not None:
        request.json_schema = _read(json_schema)
    elif json_object:
        request.json_object = True
    elif regex is not None:
        request.regex = regex
    elif choice:
        request.choice.options.extend(choice)
    elif grammar is not None:
        request.grammar = _read(grammar)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"cannot read {path}: {error}", EXIT_USAGE) from error
