"""Frequencies of rotary position embeddings, with the scalings of long-context models."""

from __future__ import annotations

import math

import torch

from shared.model_spec import ModelSpec, RopeScaling


def inverse_frequencies(spec: ModelSpec) -> torch.Tensor:
    """theta^(-2i / head_dim) for i in [0, head_dim / 2), scaled as the model says; float32.

    Sources: Su et al. 2021 (RoFormer), section 3.2.2; scalings as in transformers'
    modeling_rope_utils (`linear`, `llama3`).
    """
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    frequencies = 1.0 / (spec.rope_theta**exponents)
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    assert scaling.kind == "llama3", scaling.kind
    return _llama3(frequencies, scaling)


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones stay, those between are blended."""
    wavelengths = 2 * math.pi / frequencies
    longest_kept = scaling.original_context_length / scaling.high_freq_factor
    shortest_scaled = scaling.original_context_length / scaling.low_freq_factor
    blend = (scaling.original_context_length / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    scaled = frequencies / scaling.factor
    blended = (1 - blend) * scaled + blend * frequencies
    result = torch.where(wavelengths > shortest_scaled, scaled, frequencies)
    is_between = (wavelengths >= longest_kept) & (wavelengths <= shortest_scaled)
    return torch.where(is_between, blended, result)
