"""The native decoder as `kernels.decoder.Decoder`: one native call per step."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch

from kernels.cpu.build import BuildError, detect_isa, find_or_build
from kernels.cpu.library import (
    ERRORS,
    EXCEPTIONS,
    FORMATS,
    PHASES,
    Config,
    MatrixName,
    Step,
    VectorName,
    load_library,
)
from kernels.decoder import (
    DENSE_DTYPES,
    NO_ROWS,
    DecoderWeights,
    LayerWeights,
    StepLogits,
    StoredMatrix,
)
from kernels.interface import AttentionBatch, kv_row_size
from kernels.logits import drawn_best
from shared.model_spec import ModelSpec

logger = logging.getLogger(__name__)

Compute = Literal["auto", "float32"]

MAX_KEPT_LOGITS = 256
"""Rows of logits whose memory is kept from step to step."""

KV_DTYPES = (torch.float32, torch.bfloat16, torch.int8)
"""Of the KV cache; the index is the library's number (`KvType` in step.h)."""

_MATRICES = (
    (MatrixName.QUERY, "query"),
    (MatrixName.KEY, "key"),
    (MatrixName.VALUE, "value"),
    (MatrixName.ATTENTION_OUTPUT, "attention_output"),
    (MatrixName.GATE, "gate"),
    (MatrixName.UP, "up"),
    (MatrixName.DOWN, "down"),
)


def load_decoder(
    spec: ModelSpec,
    weights: DecoderWeights,
    *,
    compute: Compute,
    kv_dtype: torch.dtype,
    num_threads: int,
    max_num_tokens: int,
    block_size: int,
    progress: Callable[[float], None] | None,
) -> NativeDecoder | None:
    """Repacks `weights` for this machine's instruction set; None, with a warning, if it cannot.

    compute         "auto": quantised weights meet activations of 8 bits (one scale per row and 32
                    columns); "float32": every weight at its float32 value, float32 arithmetic
    kv_dtype        of the KV cache: one of KV_DTYPES
    max_num_tokens  most tokens, and most logit rows, of one step
    block_size      token slots in a KV block
    progress        called with the share of the weights done, 0 to 1

    Only the embedding keeps being read from `weights`; the other tensors may go. ValueError if a
    scale or minimum of quantised weights is not finite.
    """
    unsupported = [m.format for m in _all_matrices(weights) if m.format not in FORMATS]
    if unsupported:
        logger.warning("no native CPU decoder for weights of type %s", unsupported[0])
        return None
    try:
        library = load_library(find_or_build(detect_isa(spec.head_dim, block_size)))
    except (BuildError, OSError) as error:
        logger.warning("no native CPU decoder: %s", error)
        return None
    lanes = library.quire_num_lanes()
    if spec.head_dim % lanes:
        logger.warning("no native CPU decoder for a head_dim not a multiple of %d", lanes)
        return None
    return NativeDecoder(
        library,
        spec,
        weights,
        compute=compute,
        kv_dtype=kv_dtype,
        num_threads=num_threads,
        max_num_tokens=max_num_tokens,
        progress=progress,
    )


def _all_matrices(weights: DecoderWeights) -> list[StoredMatrix]:
    layers = [getattr(layer, field) for layer in weights.layers for _, field in _MATRICES]
    return [weights.embedding, *layers, *([weights.output] if weights.output else [])]


class NativeDecoder:
    """A model in the native library. One thread at a time may call it.

    Each row's results have the same bits whatever the batch, the chunking and `num_threads`.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        spec: ModelSpec,
        weights: DecoderWeights,
        *,
        compute: Compute,
        kv_dtype: torch.dtype,
        num_threads: int,
        max_num_tokens: int,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """See `load_decoder`. MemoryError if the weights do not fit, ValueError if a scale of
        quantised ones is not finite."""
        lanes = int(library.quire_num_lanes())
        assert kv_dtype in KV_DTYPES, f"no KV cache of {kv_dtype}"
        assert spec.head_dim % lanes == 0, f"head_dim is not a multiple of {lanes}"
        assert spec.num_heads % spec.num_kv_heads == 0
        assert len(weights.layers) == spec.num_layers > 0
        assert num_threads > 0 and max_num_tokens > 0
        self._library = library
        self._spec = spec
        self._lanes = lanes
        self._logits = self._given_logits = torch.empty(0, spec.vocab_size)
        self._best_logits = np.empty(max_num_tokens, np.float32)
        self._best_ids = np.empty(max_num_tokens, np.int64)
        self._step = Step(
            best_logits=self._best_logits.ctypes.data, best_ids=self._best_ids.ctypes.data
        )
        self._kv_cache: torch.Tensor | None = None
        self._kv_dtype = kv_dtype
        config = Config(
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            vocab_size=spec.vocab_size,
            with_quants=int(compute == "auto"),
            kv_type=KV_DTYPES.index(kv_dtype),
            num_threads=num_threads,
            max_num_tokens=max_num_tokens,
            rms_norm_eps=spec.rms_norm_eps,
        )
        self._handle = library.quire_create(ctypes.byref(config))
        if not self._handle:
            raise MemoryError("no memory for the decoder's buffers")
        started = library.quire_num_threads(self._handle)
        if started < num_threads:
            logger.warning("only %d of %d threads could be started", started, num_threads)
        self._embedding = _checked(weights.embedding, spec.vocab_size, spec.hidden_size)
        self._load(weights, progress or (lambda share: None))
        weights.release_pages()

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle:
            self._library.quire_destroy(handle)

    def forward(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        kv_cache: torch.Tensor,
        logit_rows: torch.Tensor,
        greedy_rows: torch.Tensor = NO_ROWS,
    ) -> StepLogits:
        """See `kernels.decoder.Decoder`. IndexError names an index that is out of range; nothing
        has been computed then."""
        if kv_cache is not self._kv_cache:
            self._take_cache(kv_cache)
        num_logits = logit_rows.shape[0]
        num_rows = num_logits + greedy_rows.shape[0]
        logits = self._logits_of(num_logits)
        num_tokens, num_seqs = token_ids.shape[0], batch.seq_lens.shape[0]
        assert batch.positions.shape == batch.slots.shape == (num_tokens,)
        assert batch.query_start.shape == (num_seqs + 1,)
        assert batch.block_tables.shape[0] == num_seqs
        tensors = {  # kept alive until the call is over
            "token_ids": _as(token_ids, torch.int64),
            "positions": _as(batch.positions, torch.int64),
            "slots": _as(batch.slots, torch.int64),
            "query_start": _as(batch.query_start, torch.int32),
            "seq_lens": _as(batch.seq_lens, torch.int32),
            "block_tables": _as(batch.block_tables, torch.int32),
            "logit_rows": _as(_joined(logit_rows, greedy_rows), torch.int64),
        }
        step = self._step
        step.num_tokens, step.num_seqs = num_tokens, num_seqs
        step.table_size = batch.block_tables.shape[1]
        step.num_logits, step.num_logit_rows = num_logits, num_rows
        step.logits = logits.data_ptr()
        for name, tensor in tensors.items():
            setattr(step, name, tensor.data_ptr())
        self._raise_on(self._library.quire_forward(self._handle, ctypes.byref(step)))
        greedy = slice(num_logits, num_rows)
        return StepLogits(logits, drawn_best(self._best_ids[greedy], self._best_logits[greedy]))

    def _take_cache(self, kv_cache: torch.Tensor) -> None:
        """The steps from now on are of this cache."""
        spec = self._spec
        num_slabs, num_layers, num_kv_heads, blocks_per_slab, _, block_size, _ = kv_cache.shape
        row_size = kv_row_size(spec.head_dim, self._kv_dtype)
        assert (num_layers, num_kv_heads) == (spec.num_layers, spec.num_kv_heads)
        assert kv_cache.shape[4] == 2 and kv_cache.shape[6] == row_size
        assert kv_cache.dtype == self._kv_dtype and kv_cache.is_contiguous()
        assert block_size % self._lanes == 0, f"block_size is not a multiple of {self._lanes}"
        self._kv_cache = kv_cache
        self._step.kv_cache = kv_cache.data_ptr()
        self._step.num_blocks = num_slabs * blocks_per_slab
        self._step.blocks_per_slab, self._step.block_size = blocks_per_slab, block_size

    def _logits_of(self, num_rows: int) -> torch.Tensor:
        """Room for the logits of a step, the same in each: megabytes that are new to the process
        cost it a fault for each page. What few steps want is not kept."""
        if num_rows > MAX_KEPT_LOGITS:
            return torch.empty(num_rows, self._spec.vocab_size)
        if self._logits.shape[0] < num_rows:
            self._logits = torch.empty(num_rows, self._spec.vocab_size)
        if self._given_logits.shape[0] != num_rows:
            self._given_logits = self._logits[:num_rows]
        return self._given_logits

    def phase_seconds(self) -> dict[str, float]:
        """Seconds spent so far in each phase of the steps."""
        seconds = (ctypes.c_double * len(PHASES))()
        self._library.quire_phase_seconds(self._handle, seconds)
        return dict(zip(PHASES, seconds, strict=True))

    def _load(self, weights: DecoderWeights, progress: Callable[[float], None]) -> None:
        spec = self._spec
        embedding = weights.embedding
        output = weights.output or embedding
        self._library.quire_set_embedding(
            self._handle, FORMATS.index(embedding.format), self._embedding.data_ptr()
        )
        self._set_vector(0, VectorName.FINAL_NORM, weights.final_norm, spec.hidden_size)
        self._set_vector(
            0, VectorName.INVERSE_FREQUENCIES, weights.inverse_frequencies, spec.head_dim // 2
        )
        total = sum(_num_weights(m) for m in _all_matrices(weights))
        done = 0
        if weights.output:
            done = _num_weights(embedding)
        for index, layer in enumerate(weights.layers):
            self._load_layer(index, layer)
            done += sum(_num_weights(getattr(layer, field)) for _, field in _MATRICES)
            progress(done / total)
        self._set_matrix(0, MatrixName.OUTPUT, output, spec.vocab_size, spec.hidden_size)
        progress(1.0)

    def _load_layer(self, index: int, layer: LayerWeights) -> None:
        spec = self._spec
        query_size = spec.num_heads * spec.head_dim
        kv_size = spec.num_kv_heads * spec.head_dim
        shapes = {
            MatrixName.QUERY: (query_size, spec.hidden_size),
            MatrixName.KEY: (kv_size, spec.hidden_size),
            MatrixName.VALUE: (kv_size, spec.hidden_size),
            MatrixName.ATTENTION_OUTPUT: (spec.hidden_size, query_size),
            MatrixName.GATE: (spec.intermediate_size, spec.hidden_size),
            MatrixName.UP: (spec.intermediate_size, spec.hidden_size),
            MatrixName.DOWN: (spec.hidden_size, spec.intermediate_size),
        }
        self._set_vector(index, VectorName.ATTENTION_NORM, layer.attention_norm, spec.hidden_size)
        self._set_vector(index, VectorName.MLP_NORM, layer.mlp_norm, spec.hidden_size)
        for name, field in _MATRICES:
            self._set_matrix(index, name, getattr(layer, field), *shapes[name])
            bias = getattr(layer, field + "_bias")
            if bias is not None:
                values = _floats(bias, shapes[name][0])
                self._raise_on(
                    self._library.quire_set_bias(
                        self._handle, index, name, values.data_ptr(), shapes[name][0]
                    )
                )

    def _set_matrix(
        self, layer: int, name: MatrixName, matrix: StoredMatrix, num_rows: int, num_columns: int
    ) -> None:
        data = _checked(matrix, num_rows, num_columns)
        number = FORMATS.index(matrix.format)
        self._raise_on(
            self._library.quire_set_matrix(
                self._handle, layer, name, number, data.data_ptr(), num_rows, num_columns
            )
        )

    def _set_vector(self, layer: int, name: VectorName, vector: torch.Tensor, size: int) -> None:
        values = _floats(vector, size)
        self._raise_on(
            self._library.quire_set_vector(self._handle, layer, name, values.data_ptr(), size)
        )

    def _raise_on(self, code: int) -> None:
        if code:
            raise EXCEPTIONS.get(code, IndexError)(ERRORS[code])


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype == dtype and tensor.is_contiguous():
        return tensor  # as it nearly always is; the calls below cost as much when they do nothing
    return tensor.to(dtype).contiguous()


def _joined(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if not one.shape[0]:
        return other
    return torch.cat((one, other)) if other.shape[0] else one


def _floats(vector: torch.Tensor, size: int) -> torch.Tensor:
    assert vector.shape == (size,), f"a vector of {tuple(vector.shape)}, not {size}"
    return _as(vector, torch.float32)


def _num_weights(matrix: StoredMatrix) -> int:
    return matrix.num_rows * matrix.num_columns


def _checked(matrix: StoredMatrix, num_rows: int, num_columns: int) -> torch.Tensor:
    """The matrix's data, contiguous, once its shape is found to be the model's."""
    assert (matrix.num_rows, matrix.num_columns) == (num_rows, num_columns), "wrong matrix shape"
    if matrix.format in DENSE_DTYPES:
        assert matrix.data.dtype == DENSE_DTYPES[matrix.format]
        assert matrix.data.shape == (num_rows, num_columns)
    else:
        assert matrix.data.dtype == torch.uint8 and matrix.data.shape[0] == num_rows
    return matrix.data.contiguous()
