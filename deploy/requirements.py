"""Prints what pyproject.toml asks for, one requirement a line: what an image installs.

python requirements.py [--extra NAME]... [--without NAME...]
"""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str], without: list[str]) -> list[str]:
    """The project's dependencies and those of `extras`, less the packages named in `without`."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    return [line for line in wanted if _name(line) not in without]


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return match[0].lower()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extra", action="append", default=[])
    parser.add_argument("--without", nargs="+", default=[])
    arguments = parser.parse_args()
    for line in requirements(Path("pyproject.toml"), arguments.extra, arguments.without):
        print(line)
