"""Writes small GGUF files byte by byte, sound or broken on purpose."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np

U32, STRING, ARRAY = 4, 8, 9


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def header(num_tensors: int = 0, num_metadata: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_metadata)


def entry(key: str, value_type: int, value: bytes) -> bytes:
    """One metadata entry."""
    return string(key) + struct.pack("<I", value_type) + value


def tensor(name: str, dimensions: tuple[int, ...], type_id: int, offset: int) -> bytes:
    """One entry of the tensor directory; dimensions in ggml's order."""
    sizes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return string(name) + sizes + struct.pack("<IQ", type_id, offset)


def write_llama(path: Path, **changes: object) -> Path:
    """A Llama of one layer by the gguf library; `changes` by key with __ for a dot, None removes.

    Names of tensors in `changes["tensors"]` are added.
    """
    extra_tensors = changes.pop("tensors", ())
    assert isinstance(extra_tensors, tuple)
    values: dict[str, object] = {
        "llama.block_count": 1,
        "llama.context_length": 128,
        "llama.embedding_length": 8,
        "llama.feed_forward_length": 16,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 5e5,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {key.replace("__", "."): value for key, value in changes.items()}
    writer = gguf.GGUFWriter(path, str(values.pop("general.architecture", "llama")))
    for key, value in values.items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
    draw = np.random.default_rng(7)
    for name in ("token_embd.weight", "blk.0.attn_q.weight", *extra_tensors):
        writer.add_tensor(name, draw.standard_normal((8, 8)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
