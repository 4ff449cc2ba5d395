"""What scheduler and worker both know of a model: its shape, its ids, its fingerprint.

`read_model_spec` (shared.model_files) makes one from a GGUF file or a folder with config.json and
safetensors, without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.sampling import NEUTRAL_DEFAULTS, SamplingDefaults


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama-3 style scaling of rotary frequencies, as in transformers' `rope_type: llama3`;
    `linear` uses `factor` alone."""

    kind: str  # "llama3" or "linear"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder-only model of the Llama family."""

    name: str
    """What clients call it: the file's stem or the folder's name, unless the operator says."""
    path: Path
    """The GGUF file, or the folder."""
    file_format: str  # "gguf" or "safetensors"
    architecture: str  # "llama"
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    """Hex digest over the files' metadata, tensor directory and sampled contents."""
    sampling_defaults: SamplingDefaults = NEUTRAL_DEFAULTS
