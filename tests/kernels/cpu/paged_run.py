"""Sequences fed to a native decoder step by step over a paged cache of scattered blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.cpu.build import detect_isa, find_or_build
from kernels.cpu.decoder import Compute, NativeDecoder
from kernels.cpu.library import load_library
from kernels.decoder import DecoderWeights
from kernels.interface import AttentionBatch, kv_row_size
from shared.model_spec import ModelSpec

BLOCKS_PER_SLAB = 3
KV_DTYPES: dict[Compute, torch.dtype] = {"float32": torch.float32, "auto": torch.bfloat16}


def make_decoder(
    spec: ModelSpec,
    weights: DecoderWeights,
    compute: Compute,
    *,
    num_threads: int = 2,
    block_size: int = 16,
    isa: str | None = None,
    kv_dtype: torch.dtype | None = None,
) -> NativeDecoder:
    return NativeDecoder(
        load_library(find_or_build(isa or detect_isa(spec.head_dim, block_size))),
        spec,
        weights,
        compute=compute,
        kv_dtype=kv_dtype or KV_DTYPES[compute],
        num_threads=num_threads,
        max_num_tokens=2048,
    )


class PagedRun:
    """Some sequences in one cache, which starts as NaN: what was not written must not count."""

    def __init__(
        self,
        decoder: NativeDecoder,
        spec: ModelSpec,
        compute: Compute,
        sequences: Sequence[torch.Tensor],
        *,
        block_size: int = 16,
        seed: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.decoder = decoder
        self.sequences = sequences
        self.num_computed = [0] * len(sequences)
        self.block_size = block_size
        needed = [-(-len(tokens) // block_size) for tokens in sequences]
        num_blocks = sum(needed) + 3
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
        self.tables = [list(part) for part in order[: sum(needed)].int().split(needed)]
        dtype = kv_dtype or KV_DTYPES[compute]
        row_size = kv_row_size(spec.head_dim, dtype)
        heads = (spec.num_layers, spec.num_kv_heads)
        num_slabs = -(-num_blocks // BLOCKS_PER_SLAB)
        shape = (num_slabs, *heads, BLOCKS_PER_SLAB, 2, block_size, row_size)
        nan = -1 if dtype == torch.int8 else torch.nan  # the bytes of a scale that is NaN
        self.kv_cache = torch.full(shape, nan, dtype=dtype)

    def step(self, num_new: Sequence[int]) -> list[torch.Tensor]:
        """Computes the next `num_new[i]` tokens of sequence i (0: it is not in the step); returns
        the logits of those tokens, per sequence."""
        token_ids = [
            tokens[done : done + new]
            for tokens, done, new in zip(self.sequences, self.num_computed, num_new, strict=True)
        ]
        batch = self.batch(num_new)
        rows = torch.arange(sum(num_new))
        # They hold until the next call.
        given = self.decoder.forward(torch.cat(token_ids), batch, self.kv_cache, rows)
        logits = given.logits.clone()
        self.num_computed = [a + b for a, b in zip(self.num_computed, num_new, strict=True)]
        return list(logits.split(list(num_new)))

    def batch(self, num_new: Sequence[int]) -> AttentionBatch:
        members = [i for i, new in enumerate(num_new) if new]
        seq_lens = [self.num_computed[i] + num_new[i] for i in members]
        starts = torch.tensor([0, *(num_new[i] for i in members)]).cumsum(0)
        positions = torch.cat(
            [torch.arange(self.num_computed[i], n) for i, n in zip(members, seq_lens, strict=True)]
        )
        slots = [
            self.tables[i][p // self.block_size] * self.block_size + p % self.block_size
            for i, n in zip(members, seq_lens, strict=True)
            for p in range(self.num_computed[i], n)
        ]
        width = max(len(self.tables[i]) for i in members)
        tables = [[*self.tables[i], *[-1] * (width - len(self.tables[i]))] for i in members]
        return AttentionBatch(
            query_start=starts.int(),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            slots=torch.tensor(slots),
            positions=positions,
            max_query_len=max(num_new),
            max_seq_len=max(seq_lens),
        )

    def finish(self, chunk: int) -> list[torch.Tensor]:
        """Computes all that is left, at most `chunk` tokens of each sequence per step; returns the
        logits [num_tokens, vocab_size] of each sequence."""
        parts: list[list[torch.Tensor]] = [[] for _ in self.sequences]
        while True:
            left = [
                len(tokens) - done
                for tokens, done in zip(self.sequences, self.num_computed, strict=True)
            ]
            if not any(left):
                return [torch.cat(of_sequence) for of_sequence in parts]
            for i, logits in enumerate(self.step([min(chunk, n) for n in left])):
                parts[i].append(logits)


def random_tokens(spec: ModelSpec, lengths: Sequence[int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, spec.vocab_size, (n,), generator=generator) for n in lengths]
