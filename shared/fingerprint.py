"""A digest of a model's files that scheduler and worker compute apart and compare."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shared.errors import ModelLoadError

NUM_SAMPLES = 64
SAMPLE_BYTES = 4096
MAX_SAFETENSORS_HEADER_BYTES = 100 << 20  # the limit of the safetensors library


@dataclass(frozen=True, slots=True)
class FileParts:
    """A file as the digest sees it: all of its header, samples of the rest."""

    name: str
    data: npt.NDArray[np.uint8]
    header_bytes: int


def fingerprint(parts: Iterable[FileParts]) -> str:
    """Hex digest over each file's name, size, header and evenly spread samples of its content.

    No checksum: it tells models and quantisations apart without reading gigabytes.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"quire-model")
    for part in parts:
        size, start = len(part.data), part.header_bytes
        digest.update(f"{part.name}\0{size}\0{start}\0".encode())
        digest.update(part.data[:start].data)
        last = max(start, size - SAMPLE_BYTES)
        for offset in np.linspace(start, last, NUM_SAMPLES, dtype=np.int64):
            digest.update(part.data[offset : offset + SAMPLE_BYTES].data)
    return digest.hexdigest()


def config_parts(path: Path) -> FileParts:
    """A small file, all of which counts."""
    data = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    return FileParts(path.name, data, len(data))


def safetensors_parts(path: Path) -> FileParts:
    """A safetensors file: a u64 length, so much JSON, then the tensors.

    Raises ModelLoadError when it can't be opened or its header passes its end.
    """
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:  # ValueError: an empty file can't be mapped
        raise ModelLoadError(f"cannot open {path}: {error}") from error
    if len(data) < 8:
        raise ModelLoadError(f"{path} is truncated")
    json_bytes = struct.unpack("<Q", data[:8].tobytes())[0]
    if json_bytes > min(len(data) - 8, MAX_SAFETENSORS_HEADER_BYTES):
        raise ModelLoadError(f"{path} is truncated or no safetensors file")
    return FileParts(path.name, data, 8 + json_bytes)
