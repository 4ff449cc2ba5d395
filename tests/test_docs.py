"""The documents are code: their commands, flags, files and links exist."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from protos.quire.admin.v1 import admin_pb2
from protos.quire.inference.v1 import inference_pb2
from tests.api_document import DOCUMENT, examples, with_fresh_tables
from tests.tree import ROOT

DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
COMMAND = re.compile(
    r"(?:^|[`$ ])(quire \w+|python -m [\w.]+|make [a-z-]+)([^`\n#]*)", re.MULTILINE
)
FLAG = re.compile(r"(?<!\S)(--[a-z][a-z-]*)")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
NOT_OURS = frozenset({"grpcurl", "docker"})


def _commands(text: str) -> set[tuple[str, str]]:
    """(command, rest of line) for each of our commands in code spans and blocks."""
    code = re.findall(r"```(?:sh)?\n(.*?)```|`([^`]+)`", text.replace("\\\n", " "), re.DOTALL)
    lines = [line for block, span in code for line in (block or span).splitlines()]
    return {
        (name, rest)
        for line in lines
        if line.split(maxsplit=1)[:1] and line.split(maxsplit=1)[0] not in NOT_OURS
        for name, rest in COMMAND.findall(line)
    }


@cache
def _help(command: str) -> str:
    program, *words = command.split()
    module = {"quire": ["cli"], "python": words[1:]}[program]
    arguments = [*module, *(words if program == "quire" else []), "--help"]
    ended = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"COLUMNS": "200", "PATH": ""},
        check=False,
    )
    assert ended.returncode == 0, f"{command} --help: {ended.stderr}"
    return ended.stdout


def wrong_commands(text: str) -> list[str]:
    """Commands and flags of `text` that don't exist."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wrong = []
    for command, rest in sorted(_commands(text)):
        if command.startswith("make "):
            wrong += [command] if command.removeprefix("make ") not in targets else []
        elif command.startswith("python -m tests."):
            module = command.removeprefix("python -m ").replace(".", "/")
            wrong += [] if (ROOT / f"{module}.py").exists() else [command]
        elif FLAG.search(rest) or command.startswith("quire "):
            own = rest.split(" -- ", maxsplit=1)[0]
            wrong += [
                f"{command} {flag}" for flag in FLAG.findall(own) if flag not in _help(command)
            ]
    return wrong


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_and_flags_exist(document: Path) -> None:
    assert not wrong_commands(document.read_text())


def test_a_planted_wrong_command_is_found() -> None:
    assert wrong_commands("`make nonsense`") == ["make nonsense"]
    assert wrong_commands("```sh\nquire models --nonsense\n```") == ["quire models --nonsense"]


def test_the_option_table_names_real_options() -> None:
    table = re.findall(r"^\| (`--.*?) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    flags = re.findall(r"`(--[a-z-]+)", " ".join(table))
    assert len(flags) >= 8
    assert not [flag for flag in flags if flag not in _help("quire serve")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document: Path) -> None:
    missing = [
        link for link in LINK.findall(document.read_text()) if not (document.parent / link).exists()
    ]
    assert not missing


def test_the_apis_tables_are_those_of_the_code() -> None:
    text = DOCUMENT.read_text()
    assert text == with_fresh_tables(text), "run `python -m tests.api_document`"


def test_a_planted_stale_table_is_found() -> None:
    text = DOCUMENT.read_text()
    stale = text.replace("| `max_choices` | 16 |", "| `max_choices` | 17 |")
    assert text != stale and with_fresh_tables(stale) == text


def test_every_call_has_a_heading_and_an_example() -> None:
    modules = (inference_pb2, admin_pb2, health_pb2, reflection_pb2)
    calls = [
        method.name
        for module in modules
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    assert len(calls) >= 19
    headings = re.findall(r"^### (\w+)$", DOCUMENT.read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(calls)
    code = "".join(examples("python"))
    assert not [call for call in calls if f".{call}(" not in code]
