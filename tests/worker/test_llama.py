"""The torch decoder equals transformers in float32, however a step's batch is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from shared.model_files import read_model_spec
from shared.plan import SequenceStart, StepPlan
from shared.sampling import SamplingParams
from tests.worker.tiny_llama import (
    BLOCK_SIZE,
    CPU,
    load_decoder,
    make_llama,
    make_runner,
    save_gguf,
    save_safetensors,
)
from worker_svc.input_batch import build_batch
from worker_svc.kv_cache import pool_shape
from worker_svc.models.layers import linear
from worker_svc.request_state import RequestState

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "all heads": {"num_key_value_heads": 4},
    "wide heads": {"head_dim": 32},
    "linear scaling": {
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    },
    "llama3 scaling": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
}


def logits_by_step(path: Path, prompts: list[list[int]], chunks: list[int]) -> list[torch.Tensor]:
    """Logits of every position of each prompt, computed `chunks` tokens of each at a time."""
    spec = read_model_spec(path)
    decoder = load_decoder(spec)
    state = RequestState(
        num_rows=4,
        context_length=spec.context_length,
        block_size=BLOCK_SIZE,
        num_blocks=64,
        vocab_size=spec.vocab_size,
    )
    cache = torch.full(pool_shape(spec, BLOCK_SIZE, torch.float32, 64, 5), float("nan"))
    # Blocks of the sequences lie mixed, so that only the block table finds them.
    num_blocks = [-(-len(prompt) // BLOCK_SIZE) for prompt in prompts]
    shuffled = np.random.default_rng(3).permutation(sum(num_blocks)).tolist()
    starts = []
    for handle, prompt in enumerate(prompts):
        table = [shuffled.pop() for _ in range(num_blocks[handle])]
        starts.append(SequenceStart(handle, prompt, len(prompt), 0, table, SamplingParams()))
    state.apply(StepPlan(step=1, base_step=0, starts=starts))
    collected: list[list[torch.Tensor]] = [[] for _ in prompts]
    for chunk in chunks:
        left = {h: len(p) - int(state.num_computed[h]) for h, p in enumerate(prompts)}
        planned = {h: min(chunk, tokens) for h, tokens in left.items() if tokens}
        plan = StepPlan(
            step=2,
            base_step=1,
            chunk_handles=tuple(planned),
            chunk_num_tokens=tuple(planned.values()),
            chunk_samples=(False,) * len(planned),
        )
        batch = build_batch(state, plan, CPU)
        assert batch is not None
        every_row = torch.arange(len(batch.token_ids))
        logits = decoder.forward(batch.token_ids, batch.attention, cache, every_row).logits
        for handle, rows in zip(planned, logits.split(tuple(planned.values())), strict=True):
            collected[handle].append(rows)
        state.advance(batch.rows, batch.ends)
    return [torch.cat(rows) for rows in collected]


def reference_logits(model: LlamaForCausalLM, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt])).logits[0]
    return logits


def random_prompts(lengths: list[int]) -> list[list[int]]:
    generator = np.random.default_rng(7)
    return [generator.integers(0, 96, length).tolist() for length in lengths]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(tmp_path: Path, variant: str) -> None:
    model = make_llama(**VARIANTS[variant])
    prompt = random_prompts([41])[0]
    computed = logits_by_step(save_safetensors(model, tmp_path), [prompt], [41])[0]
    torch.testing.assert_close(computed, reference_logits(model, prompt), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunks", [[64], [1] * 40, [7] * 6, [16, 1, 8, 20]])
def test_any_chunking_of_ragged_sequences_equals_transformers(
    tmp_path: Path, chunks: list[int]
) -> None:
    model = make_llama()
    prompts = random_prompts([40, 1, 8, 23])
    path = save_safetensors(model, tmp_path)
    for prompt, computed in zip(prompts, logits_by_step(path, prompts, chunks), strict=True):
        torch.testing.assert_close(computed, reference_logits(model, prompt), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["plain", "tied", "biases"])
def test_gguf_and_safetensors_of_one_model_give_equal_logits(tmp_path: Path, variant: str) -> None:
    """FIELD-FAILURES 5: Q/K rows are stored permuted; output.weight is absent when tied."""
    model = make_llama(**VARIANTS[variant])
    prompts = random_prompts([19])
    from_folder = logits_by_step(save_safetensors(model, tmp_path / "folder"), prompts, [19])
    from_gguf = logits_by_step(save_gguf(model, tmp_path / "model.gguf"), prompts, [19])
    torch.testing.assert_close(from_gguf[0], from_folder[0], atol=0, rtol=0)


def test_rope_freqs_of_a_gguf_scale_the_frequencies(tmp_path: Path) -> None:
    """FIELD-FAILURES 5: rope_freqs. Llama-3 scaling comes as factors in the file."""
    model = make_llama(**VARIANTS["llama3 scaling"])
    unscaled = 1.0 / 1e4 ** (np.arange(0, 16, 2) / 16)
    factors = (unscaled / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors.max() > 2
    path = save_gguf(model, tmp_path / "model.gguf", extra={"rope_freqs.weight": factors})
    prompt = random_prompts([60])[0]
    computed = logits_by_step(path, [prompt], [60])[0]
    torch.testing.assert_close(computed, reference_logits(model, prompt), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_rows", [1, 5, 16, 33])
def test_a_row_of_a_product_depends_on_no_other_row(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    for num_columns, num_outputs in ((576, 960), (1536, 576), (48, 100)):
        weight = torch.randn(num_outputs, num_columns, generator=generator)
        x = torch.randn(num_rows, num_columns, generator=generator)
        together = linear(x, weight)
        torch.testing.assert_close(together, x @ weight.T, atol=1e-3, rtol=1e-4)
        for row in {0, num_rows // 2, num_rows - 1}:
            assert torch.equal(linear(x[row : row + 1], weight)[0], together[row])


def test_half_precision_stays_near_float32(tmp_path: Path) -> None:
    model = make_llama(initializer_range=0.05)
    spec = read_model_spec(save_safetensors(model, tmp_path))
    prompt = random_prompts([12])[0]
    runner = make_runner(spec.path)
    start = SequenceStart(0, prompt, 12, 0, [0, 1], SamplingParams())
    runner.state.apply(StepPlan(step=1, base_step=0, starts=[start]))
    plan = StepPlan(
        step=2, base_step=1, chunk_handles=(0,), chunk_num_tokens=(12,), chunk_samples=(True,)
    )
    batch = build_batch(runner.state, plan, CPU)
    assert batch is not None
    expected = reference_logits(model, prompt)[-1]
    for dtype in (torch.bfloat16, torch.float16):
        cache = torch.zeros(pool_shape(spec, BLOCK_SIZE, dtype, 2), dtype=dtype)
        decoder = load_decoder(spec, dtype)
        logits = decoder.forward(batch.token_ids, batch.attention, cache, batch.logit_rows).logits[
            0
        ]
        assert logits.dtype == torch.float32
        torch.testing.assert_close(
            logits, expected, atol=0.05 * float(expected.abs().max()), rtol=0
        )
