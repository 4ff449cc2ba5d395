"""A spec says what the files say; what we cannot run is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from shared.errors import ModelLoadError
from shared.model_files import read_model_spec, weight_files
from shared.model_spec import RopeScaling
from tests.shared.gguf_builder import write_llama

CONFIG: dict[str, object] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_folder(folder: Path, **changes: object) -> Path:
    """A model folder; changes of None remove a key."""
    folder.mkdir(exist_ok=True)
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"w": np.arange(4096, dtype=np.float32)}, folder / "model.safetensors")
    return folder


def test_a_gguf_file(tmp_path: Path) -> None:
    spec = read_model_spec(write_llama(tmp_path / "tiny.gguf", tokenizer__ggml__eot_token_id=5))
    assert (spec.name, spec.file_format, spec.architecture) == ("tiny", "gguf", "llama")
    assert (spec.num_layers, spec.hidden_size, spec.intermediate_size) == (1, 8, 16)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (2, 1, 4, 8)
    assert (spec.context_length, spec.rope_theta, spec.rope_scaling) == (128, 5e5, None)
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2, 5))
    assert spec.tie_word_embeddings
    assert not (spec.attention_bias or spec.mlp_bias)


def test_a_gguf_file_tells_more_by_its_tensors(tmp_path: Path) -> None:
    """FIELD-FAILURES: output.weight is absent when tied."""
    tensors = ("output.weight", "blk.0.attn_q.bias", "blk.0.ffn_up.bias")
    spec = read_model_spec(write_llama(tmp_path / "tiny.gguf", tensors=tensors), name="mine")
    assert spec.name == "mine"
    assert not spec.tie_word_embeddings
    assert spec.attention_bias
    assert spec.mlp_bias


def test_a_gguf_file_with_linear_scaling(tmp_path: Path) -> None:
    path = write_llama(
        tmp_path / "tiny.gguf",
        llama__rope__scaling__type="linear",
        llama__rope__scaling__factor=4.0,
    )
    assert read_model_spec(path).rope_scaling == RopeScaling("linear", 4.0)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"general__architecture": "mamba"}, "'mamba'"),
        ({"llama__expert_count": 8}, "mixture of experts"),
        ({"llama__block_count": None}, "llama.block_count"),
        ({"llama__block_count": "one"}, "llama.block_count"),
        ({"llama__embedding_length": 0}, "llama.embedding_length"),
        ({"llama__rope__dimension_count": 2}, "part of each head"),
        ({"llama__rope__scaling__type": "yarn"}, "'yarn'"),
        ({"llama__attention__head_count": 3, "llama__attention__head_count_kv": 2}, "3 heads"),
        ({"tokenizer__ggml__eos_token_id": 8}, "beyond the vocabulary of 8"),
    ],
)
def test_a_gguf_file_that_cannot_be_served_says_why(
    tmp_path: Path, changes: dict[str, object], cause: str
) -> None:
    path = write_llama(tmp_path / "tiny.gguf", **changes)
    with pytest.raises(ModelLoadError, match=cause) as refused:
        read_model_spec(path)
    assert "tiny.gguf" in str(refused.value)


def test_a_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny", tie_word_embeddings=True, attention_bias=True)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    spec = read_model_spec(folder)
    assert (spec.name, spec.file_format, spec.architecture) == ("tiny", "safetensors", "llama")
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 16)
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2, 7))
    assert (spec.rope_theta, spec.rope_scaling) == (10000.0, None)
    assert (spec.tie_word_embeddings, spec.attention_bias, spec.mlp_bias) == (True, True, False)


def test_a_folder_may_give_the_head_dim(tmp_path: Path) -> None:
    assert read_model_spec(write_folder(tmp_path, head_dim=32)).head_dim == 32


LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_SCALING = RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5e5}, (5e5, None)),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
            (5e5, LLAMA3_SCALING),
        ),
        (
            {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}},
            (5e5, LLAMA3_SCALING),
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}}, (3e4, None)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, (1e4, RopeScaling("linear", 2.0))),
    ],
)
def test_rotary_parameters_of_old_and_new_folders(
    tmp_path: Path, changes: dict[str, object], expected: tuple[float, RopeScaling | None]
) -> None:
    spec = read_model_spec(write_folder(tmp_path, **changes))
    assert (spec.rope_theta, spec.rope_scaling) == expected


def test_mistral_is_a_llama_without_its_window(tmp_path: Path) -> None:
    config: dict[str, object] = {"model_type": "mistral", "max_position_embeddings": 32768}
    folder = write_folder(tmp_path, **config)
    (folder / "config.json").write_text(json.dumps(CONFIG | config | {"sliding_window": None}))
    assert read_model_spec(folder).architecture == "llama"
    for changes in ({}, {"sliding_window": 4096}):
        with pytest.raises(ModelLoadError, match="sliding window"):
            read_model_spec(write_folder(tmp_path, **config, **changes))


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"model_type": "gemma"}, "'gemma'"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "'yarn'"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"eos_token_id": "two"}, "eos_token_id"),
        ({"eos_token_id": 300}, "beyond the vocabulary of 300"),
        ({"num_key_value_heads": 3}, "4 heads"),
        ({"head_dim": 5}, "halves"),
    ],
)
def test_a_folder_that_cannot_be_served_says_why(
    tmp_path: Path, changes: dict[str, object], cause: str
) -> None:
    with pytest.raises(ModelLoadError, match=cause):
        read_model_spec(write_folder(tmp_path, **changes))


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"there is no model at .*nowhere"):
        read_model_spec(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelLoadError, match=r"config\.json is no JSON"):
        read_model_spec(tmp_path)


def test_the_weight_files_are_those_of_the_index(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    assert [file.name for file in weight_files(folder)] == ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    shards = {"b": "two.safetensors", "a": "one.safetensors", "c": "one.safetensors"}
    index.write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ModelLoadError, match=r"one\.safetensors, which is missing"):
        weight_files(folder)
    for name in shards.values():
        save_file({"w": np.zeros(1)}, folder / name)
    assert [file.name for file in weight_files(folder)] == ["one.safetensors", "two.safetensors"]
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(ModelLoadError, match="not a file of the folder"):
        weight_files(folder)


def test_a_folder_without_weights_or_with_broken_ones_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    weights = folder / "model.safetensors"
    for content in (b"", b"abc", b"\xff" * 64):
        weights.write_bytes(content)
        with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
            read_model_spec(folder)
    weights.unlink()
    with pytest.raises(ModelLoadError, match=r"no \.safetensors file"):
        read_model_spec(folder)


def test_the_fingerprint_tells_contents_apart_and_not_names(tmp_path: Path) -> None:
    original = write_llama(tmp_path / "a.gguf")
    copy = tmp_path / "b.gguf"
    copy.write_bytes(original.read_bytes())
    fingerprint = read_model_spec(original).fingerprint
    assert read_model_spec(copy).fingerprint == fingerprint
    changed = bytearray(original.read_bytes())
    changed[-1] ^= 1
    copy.write_bytes(changed)
    assert read_model_spec(copy).fingerprint != fingerprint


def test_the_fingerprint_of_a_folder_tells_weights_and_config_apart(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    fingerprint = read_model_spec(folder).fingerprint
    assert read_model_spec(folder).fingerprint == fingerprint
    assert read_model_spec(write_folder(tmp_path, rms_norm_eps=1e-6)).fingerprint != fingerprint
    write_folder(tmp_path)
    save_file({"w": np.arange(1, 4097, dtype=np.float32)}, folder / "model.safetensors")
    assert read_model_spec(folder).fingerprint != fingerprint
