"""A GGUF file's header: metadata and tensor directory, over a read-only memory map.

Layout (ggml/docs/gguf.md, versions 2 and 3, little endian):

    magic | version | num_tensors | num_metadata | metadata ... | tensor directory ... | pad | data

Model files come from strangers, so every count and length is checked against the bytes that are
left before anything is allocated, and each defect is a ModelLoadError with the file's name.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shared.errors import ModelLoadError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32  # bytes
MAX_NAME_BYTES = 65535
MAX_DIMENSIONS = 4

GGML_TYPES: Mapping[int, tuple[str, int, int]] = {
    # id: name, values in a block, bytes of a block (ggml/src/ggml.c, type_traits)
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, np.dtype[np.generic]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_MIN_METADATA_BYTES = 8 + 4 + 1  # empty key, type, one byte
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # empty name, number of dimensions, one, type, offset


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the tensor directory."""

    name: str
    shape: tuple[int, ...]
    """As numpy orders it: rows first, the contiguous dimension last."""
    type_name: str
    """As ggml names it: "F32", "BF16", "Q4_1" ..."""
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StringArray:
    """Strings as the file has them, for whoever wants them: those of a vocabulary take longer to
    decode than all the rest of a header."""

    path: Path
    stored: bytes
    """Each as a u64 length and so many bytes, one after the other."""
    count: int

    def decode(self) -> list[str]:
        """Raises ModelLoadError when one is not UTF-8."""
        stored, read_length, position = self.stored, _U64.unpack_from, 0
        strings = []
        for _ in range(self.count):
            start = position + _U64.size
            position = start + read_length(stored, position)[0]
            strings.append(stored[start:position])
        try:
            return list(map(bytes.decode, strings))
        except UnicodeDecodeError as error:
            raise _broken(self.path, "a string is not UTF-8") from error


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open GGUF file. The map lives as long as this object or any view of it."""

    path: Path
    metadata: Mapping[str, object]
    """Scalars as int, float, bool and str; arrays of strings as StringArray, others as numpy's."""
    tensors: Mapping[str, GgufTensor]
    data: npt.NDArray[np.uint8]
    """The whole file, read-only."""
    data_offset: int
    """Where the tensors' contents start; the header is everything before."""
    mapped: mmap.mmap
    """What `data` is a view of."""

    @classmethod
    def open(cls, path: Path | str) -> GgufFile:
        """Parse the header of `path`. Raises ModelLoadError when it is no sound GGUF file."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file can't be mapped
            raise ModelLoadError(f"cannot open the model file {path}: {error}") from error
        return _HeaderParser(path, mapped).parse()

    def tensor_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """The stored bytes of a tensor, a read-only view [num_bytes].

        Raises ModelLoadError when the file has no such tensor.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelLoadError(f"{self.path} has no tensor {name!r}")
        return self.data[tensor.offset : tensor.offset + tensor.num_bytes]

    def release_pages(self) -> None:
        """Give back the memory in which the file stands; what is read of it later comes again."""
        self.mapped.madvise(mmap.MADV_DONTNEED)


class _HeaderParser:
    """A cursor over the header; `position` never passes `end`."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path = path
        self.mapped = mapped
        self.position = 0
        self.end = len(mapped)

    def parse(self) -> GgufFile:
        num_tensors, num_metadata = self._preamble()
        metadata: dict[str, object] = {}
        for _ in range(num_metadata):
            key = self._name()
            if key in metadata:
                raise self._broken(f"metadata key {key!r} is there twice")
            metadata[key] = self._value(self._u32(), key)
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = self._alignment(metadata)
        data_offset = -(-self.position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, dimensions, type_id, offset in entries:
            if name in tensors:
                raise self._broken(f"tensor {name!r} is there twice")
            if offset % alignment:
                raise self._broken(f"tensor {name!r} is not aligned to {alignment} bytes")
            tensors[name] = self._tensor(name, dimensions, type_id, data_offset + offset)
        data = np.frombuffer(self.mapped, dtype=np.uint8)
        return GgufFile(self.path, metadata, tensors, data, min(data_offset, self.end), self.mapped)

    def _preamble(self) -> tuple[int, int]:
        """Check magic and version; give the numbers of tensors and of metadata entries."""
        if self.mapped[: len(MAGIC)] != MAGIC:
            raise self._broken("it does not start with the GGUF magic")
        self.position = len(MAGIC)
        version = self._u32()
        if version not in SUPPORTED_VERSIONS:
            hint = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
            raise self._broken(f"GGUF version {version} is not supported{hint}")
        num_tensors = self._u64()
        num_metadata = self._u64()
        least = num_tensors * _MIN_TENSOR_BYTES + num_metadata * _MIN_METADATA_BYTES
        if least > self.end - self.position:
            raise self._broken(
                f"{num_tensors} tensors and {num_metadata} metadata entries cannot fit in it"
            )
        return num_tensors, num_metadata

    def _alignment(self, metadata: Mapping[str, object]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self._broken(f"alignment {alignment!r} is no power of two")
        return alignment

    def _value(self, type_id: int, key: str) -> object:
        """The value of one metadata entry."""
        if type_id == _STRING:
            return self._string(self._u64())
        if type_id == _ARRAY:
            return self._array(key)
        return self._numbers(self._scalar(type_id, key), 1)[0].item()

    def _array(self, key: str) -> StringArray | npt.NDArray[np.generic]:
        item_type = self._u32()
        count = self._u64()
        if item_type == _STRING:
            return self._strings(count)
        return self._numbers(self._scalar(item_type, key), count)

    def _scalar(self, type_id: int, key: str) -> np.dtype[np.generic]:
        dtype = _SCALARS.get(type_id)
        if dtype is None:
            raise self._broken(f"metadata key {key!r} has the unknown value type {type_id}")
        return dtype

    def _numbers(self, dtype: np.dtype[np.generic], count: int) -> npt.NDArray[np.generic]:
        start = self._advance(count * dtype.itemsize)
        return np.frombuffer(self.mapped[start : self.position], dtype=dtype)

    def _strings(self, count: int) -> StringArray:
        """`count` strings: the one loop that a large vocabulary makes hot."""
        mapped, start, end = self.mapped, self.position, self.end
        if count * _U64.size > end - start:
            raise self._broken(f"an array of {count} strings cannot fit in it")
        read_length, position = _U64.unpack_from, start
        try:
            for _ in range(count):
                position += _U64.size + read_length(mapped, position)[0]
        except (struct.error, OverflowError) as error:  # a length itself stands past the end
            raise self._truncated() from error
        if position > end:
            raise self._truncated()
        self.position = position
        return StringArray(self.path, mapped[start:position], count)

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, dimensions in ggml's order (contiguous first), type id, offset in the data."""
        name = self._name()
        num_dimensions = self._u32()
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._broken(f"tensor {name!r} has {num_dimensions} dimensions")
        dimensions = tuple(self._u64() for _ in range(num_dimensions))
        return name, dimensions, self._u32(), self._u64()

    def _tensor(
        self, name: str, dimensions: tuple[int, ...], type_id: int, offset: int
    ) -> GgufTensor:
        if type_id not in GGML_TYPES:
            raise self._broken(f"tensor {name!r} has the unknown type {type_id}")
        type_name, values_per_block, bytes_per_block = GGML_TYPES[type_id]
        if 0 in dimensions or dimensions[0] % values_per_block:
            raise self._broken(f"tensor {name!r} of type {type_name} has dimensions {dimensions}")
        num_bytes = prod(dimensions) // values_per_block * bytes_per_block
        if offset + num_bytes > self.end:
            raise self._broken(
                f"it is truncated: tensor {name!r} needs {offset + num_bytes} bytes, "
                f"the file has {self.end}"
            )
        return GgufTensor(name, dimensions[::-1], type_name, offset, num_bytes)

    def _name(self) -> str:
        length = self._u64()
        if length > MAX_NAME_BYTES:
            raise self._broken(f"a name of {length} bytes")
        return self._string(length)

    def _string(self, length: int) -> str:
        start = self._advance(length)
        try:
            return str(self.mapped[start : self.position], "utf-8")
        except UnicodeDecodeError as error:
            raise self._broken("a string is not UTF-8") from error

    def _u32(self) -> int:
        value: int = _U32.unpack_from(self.mapped, self._advance(_U32.size))[0]
        return value

    def _u64(self) -> int:
        value: int = _U64.unpack_from(self.mapped, self._advance(_U64.size))[0]
        return value

    def _advance(self, num_bytes: int) -> int:
        """Move over `num_bytes`; give where they start."""
        start = self.position
        if num_bytes > self.end - start:
            raise self._truncated()
        self.position = start + num_bytes
        return start

    def _truncated(self) -> ModelLoadError:
        return self._broken("it is truncated: the header goes on past the end")

    def _broken(self, cause: str) -> ModelLoadError:
        return _broken(self.path, cause)


def _broken(path: Path, cause: str) -> ModelLoadError:
    return ModelLoadError(f"{path} is no usable GGUF file: {cause}")
