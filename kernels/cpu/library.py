"""The native library's interface over ctypes; step.h, model.h and decoder.cpp are its other side.

Calls release the interpreter lock.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path

FORMATS = (
    "F32",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
)
"""Weight formats; the index is the library's number (`Format` in formats.h)."""

PHASES = (
    "embed",
    "norm",
    "query_key_value",
    "rotary",
    "attention",
    "attention_output",
    "gate_up",
    "down",
    "logits",
)


class MatrixName(IntEnum):
    """`MatrixName` in model.h."""

    QUERY = 0
    KEY = 1
    VALUE = 2
    ATTENTION_OUTPUT = 3
    GATE = 4
    UP = 5
    DOWN = 6
    OUTPUT = 7


class VectorName(IntEnum):
    """`VectorName` in model.h."""

    ATTENTION_NORM = 0
    MLP_NORM = 1
    FINAL_NORM = 2
    INVERSE_FREQUENCIES = 3


ERRORS = {
    1: "the step has more tokens or logit rows than max_num_tokens",
    2: "a token id is outside the vocabulary",
    3: "a slot is outside the KV cache",
    4: "query_start and seq_lens do not fit the step's tokens",
    5: "a block table is too short or names a block outside the KV cache",
    6: "a logit row is outside the step",
    7: "out of memory",
    8: "a scale or minimum of the weights is not finite",
}
"""What a call's non-zero return means (`Error` in step.h)."""

EXCEPTIONS: dict[int, type[Exception]] = {7: MemoryError, 8: ValueError}
"""What is raised for them; IndexError for the others."""


class Config(ctypes.Structure):
    """`Config` in step.h."""

    _fields_ = (
        ("num_layers", c_int32),
        ("hidden_size", c_int32),
        ("intermediate_size", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("vocab_size", c_int32),
        ("with_quants", c_int32),
        ("kv_type", c_int32),
        ("num_threads", c_int32),
        ("max_num_tokens", c_int32),
        ("rms_norm_eps", c_float),
    )


class Step(ctypes.Structure):
    """`Step` in step.h."""

    _fields_ = (
        ("num_tokens", c_int32),
        ("num_seqs", c_int32),
        ("table_size", c_int32),
        ("block_size", c_int32),
        ("num_blocks", c_int64),
        ("blocks_per_slab", c_int32),
        ("num_logit_rows", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("block_tables", c_void_p),
        ("logit_rows", c_void_p),
        ("kv_cache", c_void_p),
        ("num_logits", c_int32),
        ("logits", c_void_p),
        ("best_logits", c_void_p),
        ("best_ids", c_void_p),
    )


def load_library(path: Path) -> ctypes.CDLL:
    """Opens the library and declares its functions; OSError if it does not load."""
    library = ctypes.CDLL(str(path))
    signatures = {
        "quire_create": ([POINTER(Config)], c_void_p),
        "quire_destroy": ([c_void_p], None),
        "quire_num_threads": ([c_void_p], c_int32),
        "quire_num_lanes": ([], c_int32),
        "quire_set_matrix": ([c_void_p, *[c_int32] * 3, c_void_p, c_int32, c_int32], c_int32),
        "quire_set_vector": ([c_void_p, c_int32, c_int32, c_void_p, c_int32], c_int32),
        "quire_set_bias": ([c_void_p, c_int32, c_int32, c_void_p, c_int32], c_int32),
        "quire_set_embedding": ([c_void_p, c_int32, c_void_p], None),
        "quire_forward": ([c_void_p, POINTER(Step)], c_int32),
        "quire_phase_seconds": ([c_void_p, POINTER(c_double)], None),
    }
    for name, (arguments, result) in signatures.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = result
    return library
