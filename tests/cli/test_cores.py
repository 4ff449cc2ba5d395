"""The workers of one machine share its threads and cores."""

from __future__ import annotations

import pytest

from cli import cores
from cli.errors import CommandError


@pytest.mark.parametrize(
    ("threads", "workers", "shares"),
    [(8, 2, [4, 4]), (7, 2, [4, 3]), (2, 3, [1, 1, 1]), (1, 1, [1])],
)
def test_threads_are_divided_among_the_workers(
    threads: int, workers: int, shares: list[int]
) -> None:
    assert cores.share_threads(threads, workers) == shares


def test_no_core_is_given_to_two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: [1, 2, 5, 8])
    assert cores.share_cores([2, 1]) == ["1,2", "5"]
    with pytest.raises(CommandError, match="5 threads need a core each, and there are 4"):
        cores.share_cores([3, 2])
