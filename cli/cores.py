"""How the workers of one machine share its cores."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cli.errors import EXIT_USAGE, CommandError


def usable_cores() -> Sequence[int]:
    """The cores that this process may use."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)


def share_threads(threads: int | None, num_workers: int) -> list[int]:
    """Threads of each worker: equal shares of `threads`, or of the cores, at least one each."""
    total = len(usable_cores()) if threads is None else threads
    return [max(1, total // num_workers + (i < total % num_workers)) for i in range(num_workers)]


def share_cores(threads: Sequence[int]) -> list[str]:
    """Cores for workers with so many threads each, no core for two of them, as lists with commas.

    Raises CommandError when there are too few.
    """
    cores = list(usable_cores())
    if sum(threads) > len(cores):
        raise CommandError(
            f"--pin-workers: {sum(threads)} threads need a core each, and there are {len(cores)}; "
            "lower --threads or --workers",
            EXIT_USAGE,
        )
    shares = []
    for count in threads:
        shares.append(",".join(map(str, cores[:count])))
        del cores[:count]
    return shares
