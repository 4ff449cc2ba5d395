"""Tiny random Llamas in both file formats, and a runner over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from transformers import LlamaConfig, LlamaForCausalLM

from kernels.dispatch import select_kernels, select_logit_kernels
from kernels.logits import LogitKernels
from shared.model_files import read_model_spec
from shared.model_spec import ModelSpec
from worker_svc.kv_cache import KvCache
from worker_svc.model_runner import ModelRunner
from worker_svc.models.llama import LlamaDecoder
from worker_svc.models.registry import WEIGHT_LOADERS
from worker_svc.request_state import RequestState

CPU = torch.device("cpu")
BLOCK_SIZE = 8
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def make_llama(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """A model of two layers with random weights, large enough to tell tokens apart."""
    torch.manual_seed(seed)
    fields: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(**(fields | overrides))).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # made as ones, which would hide a norm that is left out
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif "bias" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    return model


def save_safetensors(model: LlamaForCausalLM, folder: Path, shard_size: str = "1GB") -> Path:
    model.save_pretrained(folder, safe_serialization=True, max_shard_size=shard_size)
    return folder


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Query or key rows as llama.cpp's converter stores them."""
    by_half = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return by_half.swapaxes(1, 2).reshape(weight.shape)


def gguf_tensors(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    """The tensors under their GGUF names, query and key rows permuted, float32."""
    config = model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors: dict[str, np.ndarray] = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        module, _, kind = name.rpartition(".")
        if module.startswith("model.layers."):
            _, _, index, rest = module.split(".", 3)
            part = GGUF_NAMES[rest]
            values = permuted(values, heads[part]) if part in heads else values
            tensors[f"blk.{index}.{part}.{kind}"] = values
        else:
            top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
            tensors[f"{top.get(module, 'output')}.{kind}"] = values
    return tensors


def save_gguf(
    model: LlamaForCausalLM,
    path: Path,
    encode: Callable[[str, np.ndarray], tuple[np.ndarray, GGMLQuantizationType]] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write the model; `encode` gives a matrix's bytes and type, by default float32."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    for name, values in (gguf_tensors(model) | dict(extra or {})).items():
        if encode is None or values.ndim == 1:
            writer.add_tensor(name, np.ascontiguousarray(values))
        else:
            data, block_type = encode(name, values)
            writer.add_tensor(name, data, raw_dtype=block_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load_decoder(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> LlamaDecoder:
    weights = WEIGHT_LOADERS[spec.file_format](spec)
    return LlamaDecoder(
        spec,
        weights,
        select_kernels(CPU),
        select_logit_kernels(CPU),
        dtype,
        CPU,
        lambda fraction: None,
    )


def make_runner(
    path: Path,
    *,
    num_blocks: int = 64,
    num_host_blocks: int = 8,
    max_num_batched_tokens: int = 256,
    max_num_seqs: int = 16,
    logit_kernels: LogitKernels | None = None,
) -> ModelRunner:
    """A runner in float32 over the model at `path`; by default with the CPU's kernels."""
    spec = read_model_spec(path)
    cache = KvCache(
        spec,
        block_size=BLOCK_SIZE,
        num_device_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        dtype=torch.float32,
        device=CPU,
        kernels=select_kernels(CPU),
    )
    state = RequestState(
        num_rows=4,
        context_length=spec.context_length,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        vocab_size=spec.vocab_size,
    )
    return ModelRunner(
        load_decoder(spec),
        cache,
        state,
        logit_kernels or select_logit_kernels(CPU),
        device=CPU,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
    )
