"""The real model: next tokens equal transformers' in float32, on the decoder that CPUs use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kernels.dispatch import select_kernels
from shared.model_files import read_model_spec
from shared.model_spec import ModelSpec
from shared.plan import SequenceStart, StepPlan
from shared.sampling import SamplingParams
from tests.worker.tiny_llama import CPU
from worker_svc.config import EngineConfig
from worker_svc.input_batch import build_batch
from worker_svc.kv_cache import KvCache
from worker_svc.models.registry import load_model
from worker_svc.request_state import RequestState
from worker_svc.weights.dequantize import dense_matrix
from worker_svc.weights.gguf import load_gguf

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
MODEL = CACHE / "quire" / "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS = [
    [504, 3575, 282, 4649, 314, 7042, 30, 378, 3575, 282, 4881, 314],
    [1604, 7190, 24, 94, 727, 198, 253, 1004, 198, 472, 282],
]

pytestmark = pytest.mark.skipif(not MODEL.exists(), reason="`make model` fetches the file")


def in_transformers(spec: ModelSpec) -> LlamaForCausalLM:
    """The same weights, decoded by the gguf library, in transformers' own code."""
    weights = load_gguf(spec)
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        max_position_embeddings=spec.context_length,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        tie_word_embeddings=spec.tie_word_embeddings,
    )
    tensors = {
        "model.embed_tokens.weight": dense_matrix(weights.embedding, torch.float32, CPU),
        "model.norm.weight": weights.final_norm,
    }
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        tensors[prefix + "input_layernorm.weight"] = layer.attention_norm
        tensors[prefix + "post_attention_layernorm.weight"] = layer.mlp_norm
        for name, matrix in {
            "self_attn.q_proj": layer.query,
            "self_attn.k_proj": layer.key,
            "self_attn.v_proj": layer.value,
            "self_attn.o_proj": layer.attention_output,
            "mlp.gate_proj": layer.gate,
            "mlp.up_proj": layer.up,
            "mlp.down_proj": layer.down,
        }.items():
            tensors[f"{prefix}{name}.weight"] = dense_matrix(matrix, torch.float32, CPU)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(tensors, assign=True)
    # Buffers are not in the state: made anew, off the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


@pytest.mark.slow
def test_every_next_token_equals_transformers() -> None:
    spec = read_model_spec(MODEL)
    config = EngineConfig(MODEL, dtype="float32", num_threads=1)
    loaded = load_model(spec, config, CPU, 64, lambda fraction: None)
    cache = KvCache(
        spec,
        block_size=16,
        num_device_blocks=4,
        num_host_blocks=0,
        dtype=loaded.kv_dtype,
        device=CPU,
        kernels=select_kernels(CPU),
    )
    state = RequestState(
        num_rows=2,
        context_length=spec.context_length,
        block_size=16,
        num_blocks=4,
        vocab_size=spec.vocab_size,
    )
    starts = [
        SequenceStart(handle, prompt, len(prompt), 0, [3 - handle], SamplingParams())
        for handle, prompt in enumerate(PROMPTS)
    ]
    sizes = [len(prompt) for prompt in PROMPTS]
    plan = StepPlan(
        step=1,
        base_step=0,
        starts=starts,
        chunk_handles=[0, 1],
        chunk_num_tokens=sizes,
        chunk_samples=[True, True],
    )
    state.apply(plan)
    batch = build_batch(state, plan, CPU)
    assert batch is not None
    every_row = torch.arange(sum(sizes))
    logits = loaded.decoder.forward(
        batch.token_ids, batch.attention, cache.device_blocks, every_row
    ).logits
    model = in_transformers(spec)
    for prompt, computed in zip(PROMPTS, logits.split(sizes), strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(computed, expected, atol=2e-3, rtol=1e-3)
        assert torch.equal(computed.argmax(-1), expected.argmax(-1))
