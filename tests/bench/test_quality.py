"""The likelihoods that modes are compared by are the model's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import quality
from shared.model_files import read_model_spec
from tests.worker.tiny_llama import CPU, make_llama, save_safetensors
from worker_svc.config import EngineConfig
from worker_svc.models.registry import load_model


def test_log_likelihoods_equal_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "CHUNK_TOKENS", 7)  # several chunks, the last one short
    llama = make_llama()
    save_safetensors(llama, tmp_path)
    spec = read_model_spec(tmp_path)
    config = EngineConfig(tmp_path, dtype="float32", kv_dtype="float32")
    model = load_model(spec, config, CPU, 7, lambda _: None)
    token_ids = torch.randint(0, spec.vocab_size, (25,), generator=torch.Generator().manual_seed(1))
    log_probs, best = quality.log_likelihoods(model, spec, token_ids)
    with torch.inference_mode():
        expected = torch.log_softmax(llama(token_ids[None]).logits[0, :-1].double(), dim=-1)
    torch.testing.assert_close(
        log_probs, expected[torch.arange(24), token_ids[1:]], atol=1e-4, rtol=0
    )
    assert torch.equal(best, expected.argmax(dim=-1))
