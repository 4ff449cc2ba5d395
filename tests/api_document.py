"""docs/API.md: its tables, made of the code, and its examples, to be run.

python -m tests.api_document     writes the tables into docs/API.md
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields

from scheduler_svc.limits import Limits
from scheduler_svc.servicers.error_table import ERRORS, LIMITS
from tests.tree import ROOT

DOCUMENT = ROOT / "docs" / "API.md"
MARK = "<!-- {name}: made by python -m tests.api_document -->"


def field_sentences(kind: type) -> dict[str, str]:
    """The string below each field of a class, by the field's name."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for statement, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant), (
                f"{kind.__name__}.{statement.target.id} has no sentence"
            )
            found[statement.target.id] = " ".join(str(after.value.value).split())
    return found


def _table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _errors() -> Iterator[Sequence[str]]:
    for row in ERRORS:
        details = ", ".join(kind.DESCRIPTOR.name for kind in row.details)
        yield f"`{row.code.name}`", details or "none", row.when, row.client


def _limits() -> Iterator[Sequence[str]]:
    defaults, sentences = Limits(), field_sentences(Limits)
    for field in fields(Limits):
        value = getattr(defaults, field.name)
        yield f"`{field.name}`", f"{value:,.10g}", sentences[field.name]


def tables() -> dict[str, str]:
    """Each table's Markdown, by the name in its mark."""
    return {
        "errors": _table(["status", "details", "when", "what to do"], _errors()),
        "limits": _table(["limit", "most", "of"], _limits()),
        "exhaustible": _table(
            ["`limit`", "what is full"], ((f"`{name}`", text) for name, text in LIMITS.items())
        ),
    }


def with_fresh_tables(text: str) -> str:
    """The document with each table behind its mark written anew."""
    for name, table in tables().items():
        mark = MARK.format(name=name)
        assert text.count(mark) == 1, f"docs/API.md has no mark of the table {name}"
        text = re.sub(rf"{re.escape(mark)}\n(\|.*\n)*", lambda _: f"{mark}\n{table}", text)  # noqa: B023
    return text


def examples(language: str) -> list[str]:
    """The code blocks of one language, in order."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT.read_text(), re.M | re.S)
    return [str(block) for block in blocks]


if __name__ == "__main__":
    DOCUMENT.write_text(with_fresh_tables(DOCUMENT.read_text()))
