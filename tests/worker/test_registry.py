"""The decoder of the CPU: the native one where it can be, torch's where it can't or is wanted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels import cpu
from shared.errors import ConfigError
from shared.model_files import read_model_spec
from tests.worker.tiny_llama import CPU, make_llama, save_safetensors
from worker_svc.config import EngineConfig
from worker_svc.models import registry
from worker_svc.models.llama import LlamaDecoder
from worker_svc.models.registry import LoadedModel, load_model

NATIVE = object()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save_safetensors(make_llama(), tmp_path)


def load(path: Path, **fields: str) -> LoadedModel:
    config = EngineConfig(path, **fields)  # type: ignore[arg-type]
    return load_model(read_model_spec(path), config, CPU, 64, lambda fraction: None)


@pytest.mark.parametrize(
    ("fields", "compute", "kv_dtype"),
    [
        ({}, "auto", torch.bfloat16),
        ({"dtype": "float32"}, "float32", torch.float32),
        ({"dtype": "float32", "kv_dtype": "bfloat16"}, "float32", torch.bfloat16),
    ],
)
def test_native_is_preferred(
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
    fields: dict[str, str],
    compute: str,
    kv_dtype: torch.dtype,
) -> None:
    asked = {}
    monkeypatch.setattr(cpu, "load_decoder", lambda *_, **options: asked.update(options) or NATIVE)
    model = load(path, **fields)
    assert model.decoder is NATIVE
    assert model.kv_dtype == asked["kv_dtype"] == kv_dtype
    assert asked["compute"] == compute


@pytest.mark.parametrize("fields", [{"dtype": "bfloat16"}, {"kv_dtype": "float16"}])
def test_what_native_does_not_compute_in_goes_to_torch(path: Path, fields: dict[str, str]) -> None:
    model = load(path, **fields)
    assert isinstance(model.decoder, LlamaDecoder)
    assert model.kv_dtype == getattr(torch, next(iter(fields.values())))


def test_torch_is_the_fallback_unless_native_was_demanded(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    monkeypatch.setattr(cpu, "load_decoder", lambda *_, **__: None)
    assert isinstance(load(path).decoder, LlamaDecoder)
    with pytest.raises(ConfigError, match="native"):
        load(path, backend="native")


def test_every_file_format_has_a_loader() -> None:
    assert set(registry.WEIGHT_LOADERS) == {"gguf", "safetensors"}
