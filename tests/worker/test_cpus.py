"""A worker keeps to the cores that it is given."""

from __future__ import annotations

import os
import threading

import pytest

from shared.errors import ConfigError
from worker_svc.config import parse_config
from worker_svc.cpus import pin


def test_numbers_and_ranges() -> None:
    config = parse_config(["--model", "m.gguf", "--cpus", "0-2, 5"], {})
    assert config.cpus == frozenset({0, 1, 2, 5})
    assert config.engine.num_threads == 4  # one for each core
    assert parse_config(["--model", "m.gguf"], {"QUIRE_CPUS": "7"}).cpus == frozenset({7})


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-2", "0,,1", "0-99999999", "1.5"])
def test_anything_else_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="--cpus"):
        parse_config(["--model", "m.gguf", "--cpus", text], {})


def test_threads_of_a_pinned_one_stay_on_its_cores() -> None:
    """Pins a thread of its own, so that the other tests keep theirs."""
    seen: list[set[int]] = []
    core = max(os.sched_getaffinity(0))

    def pinned() -> None:
        pin([core])
        child = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        child.start()
        child.join()

    thread = threading.Thread(target=pinned)
    thread.start()
    thread.join()
    assert seen == [{core}]


def test_a_core_that_is_not_ours_is_named() -> None:
    with pytest.raises(ConfigError, match="may not use \\[65535\\]"):
        pin([65535])
