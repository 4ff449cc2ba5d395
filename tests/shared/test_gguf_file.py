"""The header is read as the gguf library writes it; whatever else is in a file is an error."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ModelLoadError
from shared.gguf_file import GGML_TYPES, GgufFile, StringArray
from tests.shared.gguf_builder import ARRAY, STRING, U32, entry, header, tensor, write_llama


def opened(path: Path, content: bytes) -> GgufFile:
    path.write_bytes(content)
    return GgufFile.open(path)


def test_metadata_comes_as_python_values(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.number", 7)
    writer.add_int64("a.negative", -(2**40))
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "日本")
    writer.add_array("a.strings", ["", "é", "x" * 1000])
    writer.add_array("a.numbers", [3, -1, 2])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = GgufFile.open(path).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["a.number"] == 7
    assert metadata["a.negative"] == -(2**40)
    assert metadata["a.float"] == 0.5
    assert metadata["a.flag"] is True
    assert metadata["a.text"] == "日本"
    strings = metadata["a.strings"]
    assert isinstance(strings, StringArray)
    assert strings.decode() == ["", "é", "x" * 1000]
    numbers = metadata["a.numbers"]
    assert isinstance(numbers, np.ndarray)
    assert numbers.tolist() == [3, -1, 2]


def test_what_is_read_after_the_pages_went_is_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_llama(path)
    file = GgufFile.open(path)
    before = file.data.copy()
    file.release_pages()
    assert (file.data == before).all()


@pytest.mark.parametrize(
    "type_name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
)
def test_tensors_are_where_the_library_put_them(tmp_path: Path, type_name: str) -> None:
    values = np.random.default_rng(3).standard_normal((4, 64)).astype(np.float32)
    quantized = gguf.quantize(values, gguf.GGMLQuantizationType[type_name])
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name in ("first", "second"):
        writer.add_tensor(name, quantized, raw_dtype=gguf.GGMLQuantizationType[type_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile.open(path)
    assert list(file.tensors) == ["first", "second"]
    assert (file.tensors["second"].type_name, file.tensors["second"].shape) == (type_name, (4, 64))
    assert file.tensor_bytes("second").tobytes() == quantized.tobytes()
    with pytest.raises(ModelLoadError, match="'third'"):
        file.tensor_bytes("third")


def test_the_types_are_those_of_the_library() -> None:
    library = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    shared = GGML_TYPES.keys() & library.keys()
    assert {key: GGML_TYPES[key] for key in shared} == {key: library[key] for key in shared}
    assert {0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 30} <= shared


def test_tensor_bytes_are_a_read_only_view(tmp_path: Path) -> None:
    data = GgufFile.open(write_llama(tmp_path / "m.gguf")).tensor_bytes("token_embd.weight")
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1


BROKEN = {
    "empty": (b"", "cannot open"),
    "other magic": (b"GGML" + bytes(64), "magic"),
    "old version": (header(version=1), "version 1"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "only a magic": (b"GGUF", "truncated"),
    "too many tensors": (header(num_tensors=2**60) + bytes(64), "cannot fit"),
    "too many entries": (header(num_metadata=2**60) + bytes(64), "cannot fit"),
    "long key": (header(0, 1) + struct.pack("<Q", 2**63) + bytes(64), "name of"),
    "long string": (
        header(0, 1) + entry("k", STRING, struct.pack("<Q", 2**62)) + bytes(64),
        "truncated",
    ),
    "long number array": (
        header(0, 1) + entry("k", ARRAY, struct.pack("<IQ", U32, 2**62)) + bytes(64),
        "truncated",
    ),
    "long string array": (
        header(0, 1) + entry("k", ARRAY, struct.pack("<IQ", STRING, 2**61)) + bytes(64),
        "cannot fit",
    ),
    "string array past the end": (
        header(0, 1) + entry("k", ARRAY, struct.pack("<IQQ", STRING, 1, 99)),
        "truncated",
    ),
    "string array with a length past all ends": (
        header(0, 1) + entry("k", ARRAY, struct.pack("<IQQQ", STRING, 2, 2**64 - 1, 0)),
        "truncated",
    ),
    "nested array": (
        header(0, 1) + entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1)) + bytes(64),
        "value type 9",
    ),
    "unknown value type": (header(0, 1) + entry("k", 77, bytes(64)), "'k' has the unknown .* 77"),
    "not UTF-8": (header(0, 1) + entry("k", STRING, struct.pack("<Q", 2) + b"\xff\xfe"), "UTF-8"),
    "key twice": (header(0, 2) + 2 * entry("k", U32, bytes(4)), "'k' is there twice"),
    "odd alignment": (
        header(0, 1) + entry("general.alignment", U32, struct.pack("<I", 33)),
        "alignment 33",
    ),
    "unknown tensor type": (header(1) + tensor("t", (4,), 999, 0) + bytes(64), "'t' .* type 999"),
    "tensor twice": (header(2) + 2 * tensor("t", (4,), 0, 0) + bytes(64), "'t' is there twice"),
    "no dimension": (header(1) + tensor("t", (), 0, 0) + bytes(64), "0 dimensions"),
    "many dimensions": (header(1) + tensor("t", (1,) * 5, 0, 0) + bytes(64), "5 dimensions"),
    "empty tensor": (header(1) + tensor("t", (0,), 0, 0) + bytes(64), "dimensions"),
    "part of a block": (header(1) + tensor("t", (33,), 2, 0) + bytes(64), "dimensions"),
    "huge tensor": (header(1) + tensor("t", (2**62, 2**62), 0, 0) + bytes(64), "truncated"),
    "tensor past the end": (header(1) + tensor("t", (4,), 0, 2**40) + bytes(64), "truncated"),
    "unaligned tensor": (header(1) + tensor("t", (4,), 0, 8) + bytes(64), "aligned"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_says_what_is_wrong(tmp_path: Path, name: str) -> None:
    """FIELD-FAILURES: giant headers; an unknown type is named in the error."""
    content, cause = BROKEN[name]
    with pytest.raises(ModelLoadError, match=cause) as refused:
        opened(tmp_path / "bad.gguf", content)
    assert "bad.gguf" in str(refused.value)


def test_an_array_of_strings_is_checked_when_it_is_decoded(tmp_path: Path) -> None:
    content = header(0, 1) + entry("k", ARRAY, struct.pack("<IQQ", STRING, 1, 2) + b"\xff\xfe")
    strings = opened(tmp_path / "bad.gguf", content).metadata["k"]
    assert isinstance(strings, StringArray)
    with pytest.raises(ModelLoadError, match=r"bad\.gguf .* UTF-8"):
        strings.decode()


def test_a_missing_file_and_a_folder_say_so(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.gguf", tmp_path):
        with pytest.raises(ModelLoadError, match="cannot open"):
            GgufFile.open(path)


def test_a_file_cut_anywhere_is_an_error(tmp_path: Path) -> None:
    whole = write_llama(tmp_path / "whole.gguf").read_bytes()
    for size in (*range(0, 700, 13), len(whole) - 1):
        with pytest.raises(ModelLoadError):
            opened(tmp_path / f"{size}.gguf", whole[:size])


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("gguf") / "whole.gguf")


@settings(deadline=None, derandomize=True, max_examples=300)
@given(position=st.integers(0, 900), byte=st.integers(0, 255))
def test_any_changed_byte_is_read_or_refused(whole_file: Path, position: int, byte: int) -> None:
    content = bytearray(whole_file.read_bytes())
    content[position] = byte
    try:
        file = opened(whole_file.with_name("changed.gguf"), bytes(content))
    except ModelLoadError:
        return
    for tensor_entry in file.tensors.values():
        assert len(file.tensor_bytes(tensor_entry.name)) == tensor_entry.num_bytes
