"""The real model's vocabulary, read once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scheduler_svc.text.tokenizer import TextModel
from shared.gguf_file import GgufFile
from shared.model_files import read_model_spec

DEFAULT_MODEL = Path.home() / ".cache/quire/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def model_path() -> Path:
    path = Path(os.environ.get("QUIRE_TEST_MODEL", DEFAULT_MODEL))
    if not path.exists():
        assert "QUIRE_TEST_MODEL" not in os.environ, f"QUIRE_TEST_MODEL names no file: {path}"
        pytest.skip(f"no model at {path}: run `make model`")
    return path


@pytest.fixture(scope="session")
def gguf(model_path: Path) -> GgufFile:
    return GgufFile.open(model_path)


@pytest.fixture(scope="session")
def smollm(model_path: Path) -> TextModel:
    return TextModel.load(read_model_spec(model_path))
