"""Reads what a model's files say about it into a ModelSpec; no weights, no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shared.errors import ModelLoadError
from shared.fingerprint import FileParts, config_parts, fingerprint, safetensors_parts
from shared.generation_config import sampling_defaults
from shared.gguf_file import GgufFile
from shared.model_spec import ModelSpec, RopeScaling
from shared.sampling import NEUTRAL_DEFAULTS

MAX_JSON_BYTES = 64 << 20
LLAMA_MODEL_TYPES = frozenset({"llama", "mistral"})

JsonObject = Mapping[str, Any]


def read_model_spec(
    path: Path, name: str | None = None, *, use_generation_config: bool = True
) -> ModelSpec:
    """The spec of the model at `path`: a GGUF file, or a folder with config.json and safetensors.

    `name` is what clients call it; by default the file's stem or the folder's name. Without
    `use_generation_config` a folder sets no sampling defaults; what ends a sequence stays. Raises
    ModelLoadError with a sentence that names the file and what is wrong with it.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return _spec_of_folder(path, name or path.resolve().name, use_generation_config)
    if not path.exists():
        raise ModelLoadError(f"there is no model at {path}")
    return _spec_of_gguf(path, name or path.stem)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, sorted by name.

    Raises ModelLoadError when there are none, or when one that the index names is missing.
    """
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelLoadError(f"{folder} holds no .safetensors file")
        return files
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index} has no weight_map")
    names = sorted({str(value) for value in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ModelLoadError(f"{index} names {name!r}, which is not a file of the folder")
        if not (folder / name).is_file():
            raise ModelLoadError(f"{index} names {name}, which is missing")
    return [folder / name for name in names]


class _Fields:
    """Typed reads from a metadata mapping, with errors that name file and key."""

    def __init__(self, path: Path, values: Mapping[str, object]) -> None:
        self.path = path
        self.values = values

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ModelLoadError(f"{self.path}: {key} should be a positive integer, is {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
            raise ModelLoadError(f"{self.path}: {key} should be a positive number, is {value!r}")
        return float(value)

    def token_id(self, key: str) -> int | None:
        ids = self.token_ids(key)
        return ids[0] if ids else None

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id or a list of ids; empty when absent."""
        value = self.values.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and 0 <= item < 2**32 for item in ids):
            raise ModelLoadError(f"{self.path}: {key} should be token ids, is {value!r}")
        return tuple(ids)


def _spec_of_gguf(path: Path, name: str) -> ModelSpec:
    gguf = GgufFile.open(path)
    fields = _Fields(path, gguf.metadata)
    architecture = gguf.metadata.get("general.architecture")
    if architecture != "llama":
        raise _unsupported(path, f"architecture {architecture!r}")
    if gguf.metadata.get("llama.expert_count"):
        raise _unsupported(path, "a mixture of experts")
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{path} has no usable tensor 'token_embd.weight'")
    num_heads = fields.integer("llama.attention.head_count")
    hidden_size = fields.integer("llama.embedding_length")
    head_dim = fields.integer("llama.attention.key_length", hidden_size // num_heads)
    if fields.integer("llama.rope.dimension_count", head_dim) != head_dim:
        raise _unsupported(path, "rotary embedding over a part of each head")
    return _checked(
        ModelSpec(
            name=name,
            path=path,
            file_format="gguf",
            architecture="llama",
            num_layers=fields.integer("llama.block_count"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("llama.feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=fields.integer("llama.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            vocab_size=embedding.shape[0],
            context_length=fields.integer("llama.context_length"),
            rms_norm_eps=fields.number("llama.attention.layer_norm_rms_epsilon", 1e-5),
            rope_theta=fields.number("llama.rope.freq_base", 10000.0),
            rope_scaling=_gguf_rope_scaling(path, fields),
            tie_word_embeddings="output.weight" not in gguf.tensors,
            attention_bias="blk.0.attn_q.bias" in gguf.tensors,
            mlp_bias="blk.0.ffn_up.bias" in gguf.tensors,
            bos_token_id=fields.token_id("tokenizer.ggml.bos_token_id"),
            eos_token_ids=_distinct(
                token_id
                for kind in ("eos", "eot", "eom")
                for token_id in fields.token_ids(f"tokenizer.ggml.{kind}_token_id")
            ),
            fingerprint=fingerprint([FileParts("gguf", gguf.data, gguf.data_offset)]),
        )
    )


def _gguf_rope_scaling(path: Path, fields: _Fields) -> RopeScaling | None:
    """Linear scaling only: GGUF stores Llama-3 scaling as the tensor rope_freqs.weight."""
    kind = fields.values.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise _unsupported(path, f"rotary scaling {kind!r}")
    return RopeScaling("linear", fields.number("llama.rope.scaling.factor", 1.0))


def _spec_of_folder(folder: Path, name: str, use_generation_config: bool) -> ModelSpec:
    config_path = folder / "config.json"
    config = _read_json(config_path)
    fields = _Fields(config_path, config)
    _check_supported(config_path, config)
    generation_path = folder / "generation_config.json"
    generation = _Fields(
        generation_path, _read_json(generation_path) if generation_path.exists() else {}
    )
    rope_theta, rope_scaling = _rope(config_path, config)
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    context_length = fields.integer("max_position_embeddings", 2048)
    parts = [config_parts(config_path), *map(safetensors_parts, weight_files(folder))]
    return _checked(
        ModelSpec(
            name=name,
            path=folder,
            file_format="safetensors",
            architecture="llama",
            num_layers=fields.integer("num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", num_heads),
            head_dim=fields.integer("head_dim", hidden_size // num_heads),
            vocab_size=fields.integer("vocab_size"),
            context_length=context_length,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            bos_token_id=fields.token_id("bos_token_id"),
            eos_token_ids=_distinct(
                (*fields.token_ids("eos_token_id"), *generation.token_ids("eos_token_id"))
            ),
            fingerprint=fingerprint(parts),
            sampling_defaults=sampling_defaults(generation_path, generation.values)
            if use_generation_config
            else NEUTRAL_DEFAULTS,
        )
    )


def _check_supported(path: Path, config: JsonObject) -> None:
    model_type = config.get("model_type")
    if model_type not in LLAMA_MODEL_TYPES:
        raise _unsupported(path, f"model type {model_type!r}")
    # transformers fills in 4096 for a Mistral config that leaves the key out
    window = config.get("sliding_window", 4096 if model_type == "mistral" else None)
    if window is not None and window < config.get("max_position_embeddings", 0):
        raise _unsupported(path, "attention in a sliding window")
    if config.get("quantization_config"):
        raise _unsupported(path, "quantized safetensors")
    if config.get("hidden_act", "silu") != "silu":
        raise _unsupported(path, f"activation {config['hidden_act']!r}")


def _rope(path: Path, config: JsonObject) -> tuple[float, RopeScaling | None]:
    """Base and scaling of rotary embeddings, in either layout of transformers:

    rope_parameters {rope_theta, rope_type, ...} since version 5; before that rope_theta at the top
    and rope_scaling {rope_type or type, ...}.
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise ModelLoadError(f"{path}: the rotary parameters should be an object")
    fields = _Fields(path, parameters)
    theta = fields.number("rope_theta", _Fields(path, config).number("rope_theta", 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    factor = fields.number("factor", 1.0)
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    if kind != "llama3":
        raise _unsupported(path, f"rotary scaling {kind!r}")
    return theta, RopeScaling(
        "llama3",
        factor,
        fields.number("low_freq_factor", 1.0),
        fields.number("high_freq_factor", 4.0),
        fields.integer("original_max_position_embeddings", 8192),
    )


def _checked(spec: ModelSpec) -> ModelSpec:
    """What every later computation takes for granted."""
    if spec.num_heads % spec.num_kv_heads:
        raise ModelLoadError(
            f"{spec.path}: {spec.num_heads} heads do not divide by {spec.num_kv_heads} KV heads"
        )
    if spec.head_dim < 2 or spec.head_dim % 2:
        raise ModelLoadError(f"{spec.path}: a head of {spec.head_dim} dimensions has no halves")
    special = (*spec.eos_token_ids, *(() if spec.bos_token_id is None else (spec.bos_token_id,)))
    if any(token_id >= spec.vocab_size for token_id in special):
        raise ModelLoadError(
            f"{spec.path}: the special token ids {special} are beyond the vocabulary "
            f"of {spec.vocab_size}"
        )
    return spec


def _read_json(path: Path) -> JsonObject:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelLoadError(f"{path} is larger than {MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} should hold a JSON object")
    return value


def _distinct(token_ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(token_ids))


def _unsupported(path: Path, what: str) -> ModelLoadError:
    return ModelLoadError(f"{path}: {what} is not supported; Llama-family models are")
