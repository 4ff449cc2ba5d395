"""The same model in transformers, in float32: the oracle of the end-to-end tests.

    python -m tests.e2e.reference MODEL.gguf

writes data/greedy.json anew: for each prompt its token ids, and 64 tokens of greedy continuation.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from shared.gguf_file import GgufFile
from shared.model_files import read_model_spec
from shared.model_spec import ModelSpec
from tests.e2e.prompts import CHATS, TEXTS

GREEDY_FILE = Path(__file__).parent / "data" / "greedy.json"
NUM_TOKENS = 64

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


@dataclass(frozen=True, slots=True)
class Continuation:
    """A prompt and what follows it."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    smallest_margin: float
    """The least lead of a chosen token's logit over the next one's; a tiny one means that another
    order of the same additions may choose otherwise."""


def load_model(path: Path) -> LlamaForCausalLM:
    """The GGUF's weights, dequantised by the gguf library, in transformers' own model."""
    spec = read_model_spec(path)
    model = LlamaForCausalLM(_config(spec))
    model.train(False)
    model.load_state_dict(_state(GgufFile.open(path), spec), strict=False)
    model.tie_weights()
    return model


def _config(spec: ModelSpec) -> LlamaConfig:
    assert spec.rope_scaling is None and spec.tie_word_embeddings
    return LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.context_length,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=spec.bos_token_id,
        eos_token_id=list(spec.eos_token_ids),
        dtype="float32",
    )


def _state(file: GgufFile, spec: ModelSpec) -> dict[str, torch.Tensor]:
    state = {}
    for name, tensor in file.tensors.items():
        kind = gguf.GGMLQuantizationType[tensor.type_name]
        dense = gguf.quants.dequantize(np.asarray(file.tensor_bytes(name)), kind)
        weight = torch.from_numpy(np.array(dense, dtype=np.float32).reshape(tensor.shape))
        layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        key = name if layer is None else layer[2]
        if key.startswith(("attn_q.", "attn_k.")):
            heads = spec.num_heads if key.startswith("attn_q.") else spec.num_kv_heads
            weight = _half_rotated(weight, heads)
        prefix = "" if layer is None else f"model.layers.{layer[1]}."
        state[prefix + _NAMES[key]] = weight
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def _half_rotated(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """From GGUF's row order, where rotary pairs lie side by side, to that of transformers."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


@torch.inference_mode()
def continue_greedily(
    model: LlamaForCausalLM, prompt_token_ids: list[int], num_tokens: int
) -> Continuation:
    """The most likely token, `num_tokens` times; the end of sequence is a token like others."""
    inputs, cache, chosen, margin = torch.tensor([prompt_token_ids]), None, [], float("inf")
    for _ in range(num_tokens):
        output = model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        best = torch.topk(output.logits[0, -1], 2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        chosen.append(int(best.indices[0]))
        inputs, cache = torch.tensor([[chosen[-1]]]), output.past_key_values
    return Continuation(prompt_token_ids, chosen, margin)


def read_greedy() -> dict[str, Continuation]:
    """The kept continuations, by the prompt's name."""
    return {
        name: Continuation(**kept) for name, kept in json.loads(GREEDY_FILE.read_text()).items()
    }


def write_model_folder(model: LlamaForCausalLM, gguf_path: Path, folder: Path) -> None:
    """The model as a folder of transformers: config, safetensors, tokenizer."""
    model.save_pretrained(folder)
    load_tokenizer(gguf_path).save_pretrained(folder)


def load_tokenizer(gguf_path: Path) -> PreTrainedTokenizerBase:
    """The GGUF's tokenizer as transformers converts it; takes some seconds."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        str(gguf_path.parent), gguf_file=gguf_path.name
    )
    return tokenizer


def main() -> None:
    path = Path(sys.argv[1])
    tokenizer, model = load_tokenizer(path), load_model(path)
    prompts = {name: tokenizer(text).input_ids for name, text in TEXTS.items()}
    for name, messages in CHATS.items():
        rendered = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        prompts[name] = tokenizer(rendered, add_special_tokens=False).input_ids
    lines = []
    for name, prompt_token_ids in prompts.items():
        kept = continue_greedily(model, prompt_token_ids, NUM_TOKENS)
        lines.append(
            f"{json.dumps(name)}: "
            + json.dumps(
                {
                    "prompt_token_ids": kept.prompt_token_ids,
                    "token_ids": kept.token_ids,
                    "smallest_margin": round(kept.smallest_margin, 6),
                }
            )
        )
        text = tokenizer.decode(kept.token_ids)
        print(
            f"{name}: {len(prompt_token_ids)} tokens, margin {kept.smallest_margin:.2e}: {text!r}"
        )
    GREEDY_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
