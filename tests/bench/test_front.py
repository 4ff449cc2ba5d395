"""The bench of the front, on a load that any machine carries."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import front
from bench.front import Load, measure
from tests.api.tiny_model import write_tiny_model


def test_every_token_is_matched_with_the_time_at_which_it_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "WARM_UP_S", 0.1)
    load = Load(
        streams=6,
        tokens_per_s=150.0,
        connections=2,
        sparse=2,
        sparse_steps_per_s=10.0,
        seconds=0.6,
    )
    figures = measure(write_tiny_model(tmp_path / "tiny"), load)
    assert figures.tokens_per_s > 0
    assert figures.messages_per_s <= figures.tokens_per_s
    for delay_ms in (figures.delay_ms, figures.sparse_delay_ms):
        assert delay_ms is not None
        assert 0 < delay_ms.p50 <= delay_ms.p99
