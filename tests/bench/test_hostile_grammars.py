"""The bench of hostile constraints: each one is refused, and ordinary ones are not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench import hostile_grammars
from scheduler_svc.text.tokenizer import TextModel
from shared.model_files import read_model_spec
from tests.api.fake_worker import joined
from tests.api.serving import SERVING, serving
from tests.api.tiny_model import write_tiny_model


def test_all_are_refused_alone_and_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hostile_grammars, "COPIES", 2)
    monkeypatch.setattr(hostile_grammars, "NUM_ALONE", 1)
    monkeypatch.setattr(hostile_grammars, "NUM_ORDINARY", 2)
    spec = read_model_spec(write_tiny_model(tmp_path / "tiny"))

    async def run() -> None:
        text_model = TextModel.load(spec)
        async with serving(spec, text_model) as served, joined(served.worker()):
            await served.wait_status(SERVING)
            await hostile_grammars.measure(served.server.address)
            await served.wait_idle()

    asyncio.run(run())
    out = capsys.readouterr().out
    assert not [name for name in hostile_grammars.HOSTILE if f"\n{name} " not in out]
