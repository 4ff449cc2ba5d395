"""The cores that a worker may use, as text and for the process."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection

from shared.errors import ConfigError

MAX_CPU = 1 << 16


def parse_cpus(text: str) -> frozenset[int]:
    """The text 0-3,8 names cores 0, 1, 2, 3 and 8. Raises ArgumentTypeError."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise argparse.ArgumentTypeError('must be numbers and ranges of cores, like "0-3,8"')
        end = int(last or first)
        if not int(first) <= end < MAX_CPU:
            raise argparse.ArgumentTypeError(f"{part} is no range of cores")
        cpus.update(range(int(first), end + 1))
    return frozenset(cpus)


def pin(cpus: Collection[int]) -> None:
    """This thread, and what it starts from now on, runs on `cpus` alone.

    Raises ConfigError when the process may not use them.
    """
    usable = os.sched_getaffinity(0)
    if missing := sorted(set(cpus) - usable):
        raise ConfigError(f"--cpus: this process may not use {missing}, only {sorted(usable)}")
    os.sched_setaffinity(0, cpus)
