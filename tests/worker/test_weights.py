"""Weight files become the values that they say, and broken ones are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from shared.errors import ModelLoadError
from shared.model_files import read_model_spec
from tests.worker.tiny_llama import CPU, gguf_tensors, make_llama, save_gguf, save_safetensors
from worker_svc.weights.dequantize import dense_matrix
from worker_svc.weights.gguf import QUANTIZED_FORMATS, load_gguf, rows_in_halves
from worker_svc.weights.safetensors import load_safetensors

WIDE: dict[str, Any] = {  # rows of whole 256-value blocks
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
}


def encoded(name: str, values: np.ndarray, block_type: GGMLQuantizationType) -> np.ndarray:
    """The matrix in blocks of a type; random blocks where the library only decodes it."""
    try:
        return quantize(values, block_type)
    except NotImplementedError:
        block_size, type_size = GGML_QUANT_SIZES[block_type]
        generator = np.random.default_rng(len(name))
        shape = (values.shape[0], values.shape[1] // block_size, type_size)
        blocks = generator.integers(0, 256, shape, dtype=np.uint8)
        blocks.view(np.uint8)[..., 1::2] &= 0x3B  # float16 scales stay finite wherever they stand
        return blocks.reshape(values.shape[0], -1)


@pytest.mark.parametrize("block_type", sorted((*QUANTIZED_FORMATS, "F32", "F16", "BF16")))
def test_every_type_gives_the_values_that_the_library_decodes(
    tmp_path: Path, block_type: str
) -> None:
    """FIELD-FAILURES 5: BF16 read as bytes; and every other type."""
    kind = GGMLQuantizationType[block_type]
    model = make_llama(**WIDE)
    path = save_gguf(model, tmp_path / "m.gguf", lambda n, v: (encoded(n, v, kind), kind))
    weights = load_gguf(read_model_spec(path))
    layer = weights.layers[0]
    assert weights.output is not None
    matrices = {
        "blk.0.attn_v": layer.value,
        "blk.0.attn_output": layer.attention_output,
        "blk.0.ffn_gate": layer.gate,
        "blk.0.ffn_up": layer.up,
        "blk.0.ffn_down": layer.down,
        "token_embd": weights.embedding,
        "output": weights.output,
    }
    for name, matrix in matrices.items():
        values = gguf_tensors(model)[f"{name}.weight"]
        expected = dequantize(encoded(f"{name}.weight", values, kind), kind)
        assert matrix.format == block_type
        dense = dense_matrix(matrix, torch.float32, CPU)
        np.testing.assert_array_equal(dense.numpy(), expected, err_msg=name)
    for name, matrix in {"blk.0.attn_q": layer.query, "blk.0.attn_k": layer.key}.items():
        values = gguf_tensors(model)[f"{name}.weight"]
        stored = torch.from_numpy(dequantize(encoded(f"{name}.weight", values, kind), kind))
        dense = dense_matrix(matrix, torch.float32, CPU)
        torch.testing.assert_close(dense, rows_in_halves(stored, 64), atol=0, rtol=0)


def test_query_rows_return_to_the_order_before_conversion() -> None:
    """FIELD-FAILURES 5: Llama Q/K rows are stored permuted."""
    stored = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15])
    assert rows_in_halves(stored, 8).tolist() == list(range(16))


def test_an_unknown_type_is_named(tmp_path: Path) -> None:
    """FIELD-FAILURES 5: an unknown type is named in the error."""
    kind = GGMLQuantizationType.IQ4_NL
    path = save_gguf(make_llama(), tmp_path / "m.gguf", lambda n, v: (encoded(n, v, kind), kind))
    with pytest.raises(ModelLoadError, match=r"output.weight.*IQ4_NL.*Q4_0"):
        load_gguf(read_model_spec(path))


def test_a_missing_gguf_tensor_is_named(tmp_path: Path) -> None:
    model = make_llama()
    writer_path = save_gguf(model, tmp_path / "m.gguf")
    data = writer_path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight")
    writer_path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=r"blk\.1\.ffn_up\.weight"):
        load_gguf(read_model_spec(writer_path))


def test_a_misshapen_gguf_tensor_is_named(tmp_path: Path) -> None:
    extra = {"blk.0.ffn_up.weight": np.zeros((64, 96), np.float32)}
    path = save_gguf(make_llama(), tmp_path / "m.gguf", extra=extra)
    with pytest.raises(ModelLoadError, match=r"ffn_up.weight.*\(64, 96\), not \(96, 64\)"):
        load_gguf(read_model_spec(path))


def test_sharded_safetensors_equal_one_file(tmp_path: Path) -> None:
    model = make_llama()
    one = load_safetensors(read_model_spec(save_safetensors(model, tmp_path / "one")))
    folder = save_safetensors(model, tmp_path / "many", shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    many = load_safetensors(read_model_spec(folder))
    for layer, other in zip(one.layers, many.layers, strict=True):
        assert torch.equal(layer.down.data, other.down.data)
    assert torch.equal(one.embedding.data, many.embedding.data)


@pytest.mark.parametrize(
    ("dtype", "format_name"), [(torch.bfloat16, "BF16"), (torch.float16, "F16")]
)
def test_half_precision_safetensors_keep_their_type(
    tmp_path: Path, dtype: torch.dtype, format_name: str
) -> None:
    model = make_llama().to(dtype)
    weights = load_safetensors(read_model_spec(save_safetensors(model, tmp_path)))
    assert weights.embedding.format == format_name
    assert torch.equal(weights.embedding.data, model.model.embed_tokens.weight)
    assert weights.final_norm.dtype == torch.float32


def test_safetensors_defects_are_named(tmp_path: Path) -> None:
    folder = save_safetensors(make_llama(), tmp_path)
    spec = read_model_spec(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != name}, file)
    with pytest.raises(ModelLoadError, match=f"no tensor '{name}'"):
        load_safetensors(spec)
    save_file(tensors | {name: tensors[name].T.contiguous()}, file)
    with pytest.raises(ModelLoadError, match=r"up_proj.weight.*\(64, 96\), not \(96, 64\)"):
        load_safetensors(spec)
    save_file(tensors | {name: tensors[name].to(torch.int32)}, file)
    with pytest.raises(ModelLoadError, match=r"up_proj.weight.*int32"):
        load_safetensors(spec)
    file.write_bytes(b"garbage")
    with pytest.raises(ModelLoadError, match=r"cannot read .*model.safetensors"):
        load_safetensors(spec)
