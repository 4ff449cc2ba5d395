"""The native CPU decoder against this machine's limits, phase by phase.

    python -m bench.kernels --model PATH [--threads 2] [--compute auto|float32]
        [--kv-cache-dtype float32|bfloat16|int8]

For steps of several kinds, prints tokens a second and, per phase, milliseconds, operations and
weight bytes a second, and the share of the roofline: the larger of bytes / read bandwidth and
operations / peak; of attention in steps that decode, the bytes of keys and values a second. The
limits are measured in turns with the steps of each kind, as a machine that is shared has other
limits a minute later, and every figure is the best of several. The phase of gate and up holds SiLU
and the quantising of what it gives: what these take by themselves stands beside it.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels import cpu, reference
from kernels.cpu import NativeDecoder, load_decoder
from kernels.cpu.build import ISA_FLAGS, detect_isa
from kernels.cpu.library import PHASES
from kernels.decoder import NO_ROWS, DecoderWeights, LayerWeights, StoredMatrix
from kernels.interface import AttentionBatch
from shared.model_files import read_model_spec
from shared.model_spec import ModelSpec
from worker_svc.kv_cache import KvCache, block_bytes
from worker_svc.weights.gguf import load_gguf

KERNELS = Path(cpu.__file__).parent
BLOCK_SIZE = 16
NUM_ROUNDS = 5
"""Times that the limits and a step are measured in turns"""
NUM_TRIES = 8
"""Steps of a round"""
SILU_COLUMNS = 32
"""Columns of the rows that `silu.cpp` times."""
MOST_SILU_ROWS = 36
"""More do not fit the first-level cache with what they become."""
KV_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
DEFAULT_KV = {"auto": "bfloat16", "float32": "float32"}
MATRICES_OF_PHASES = {
    "query_key_value": ("query", "key", "value"),
    "attention_output": ("attention_output",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}


@dataclass(frozen=True)
class Roofline:
    """Per second, over the threads used."""

    bytes_read: float
    octet_operations: float
    float_operations: float

    @classmethod
    def best(cls, measured: list[list[float]]) -> Roofline:
        return cls(*(max(values) for values in zip(*measured, strict=True)))

    def seconds(self, operations: float, num_bytes: float, *, in_8_bits: bool) -> float:
        peak = self.octet_operations if in_8_bits else self.float_operations
        return max(operations / peak, num_bytes / self.bytes_read)


@dataclass(frozen=True)
class Workload:
    """`num_seqs` sequences of `context` tokens, of which the last `num_new` are computed."""

    num_seqs: int
    num_new: int
    context: int

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.num_new

    @property
    def num_read(self) -> int:
        """Positions whose keys and values a step that decodes reads once."""
        return self.num_seqs * self.context if self.num_new == 1 else 0

    @property
    def name(self) -> str:
        kind = "decode" if self.num_new == 1 else f"prefill {self.num_new}"
        return f"{kind}, {self.num_seqs} sequence(s), context {self.context}"

    def batch(self) -> AttentionBatch:
        blocks_each = -(-self.context // BLOCK_SIZE)
        tables = torch.arange(self.num_seqs * blocks_each, dtype=torch.int32)
        first = self.context - self.num_new
        positions = torch.arange(first, self.context).repeat(self.num_seqs)
        starts = torch.arange(self.num_seqs).repeat_interleave(self.num_new)
        return AttentionBatch(
            query_start=torch.arange(self.num_seqs + 1, dtype=torch.int32) * self.num_new,
            seq_lens=torch.full((self.num_seqs,), self.context, dtype=torch.int32),
            block_tables=tables.reshape(self.num_seqs, blocks_each),
            slots=starts * blocks_each * BLOCK_SIZE + positions,
            positions=positions,
            max_query_len=self.num_new,
            max_seq_len=self.context,
        )


WORKLOADS = (
    Workload(1, 1, 64),
    Workload(1, 1, 1000),
    Workload(8, 1, 64),
    Workload(32, 1, 256),
    Workload(8, 1, 4000),
    Workload(1, 128, 128),
    Workload(1, 512, 512),
)


@contextmanager
def built(source: str) -> Iterator[Callable[..., list[float]]]:
    """A program of this folder, built as the decoder is: called with integers, it gives the numbers
    that it prints."""
    isa = detect_isa()
    if isa == "portable":
        raise SystemExit("this machine has no AVX2")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program"
        flags = [*ISA_FLAGS[isa], "-std=c++17", "-ffp-contract=off", "-pthread", f"-I{KERNELS}"]
        path = Path(__file__).with_name(source)
        subprocess.run(["g++", *flags, str(path), "-o", str(program)], check=True)

        def run(*arguments: int) -> list[float]:
            command = [str(program), *map(str, arguments)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            return [float(word) for word in done.stdout.split()]

        yield run


def silu_seconds(spec: ModelSpec, num_threads: int) -> list[float]:
    """What SiLU and quantising take of each workload by themselves, in the first-level cache."""
    rows_each = [min(MOST_SILU_ROWS, -(-work.num_tokens // num_threads)) for work in WORKLOADS]
    blocks_per_row = spec.intermediate_size / SILU_COLUMNS
    with built("silu.cpp") as program:
        row_block_seconds = program(*rows_each)
    return [
        row_block_s * blocks_per_row * num_rows / num_threads
        for row_block_s, num_rows in zip(
            row_block_seconds,
            ((spec.num_layers - 1) * work.num_tokens + work.num_seqs for work in WORKLOADS),
            strict=True,
        )
    ]


def products_of(
    weights: DecoderWeights, work: Workload, phase: str
) -> list[tuple[int, StoredMatrix]]:
    """The matrices of a phase, with the rows that each multiplies: behind the last layer's keys and
    values only those with logits go on."""
    if phase == "logits":
        return [(work.num_seqs, weights.output or weights.embedding)]
    names = MATRICES_OF_PHASES.get(phase, ())
    layers: list[LayerWeights] = list(weights.layers)
    last_rows = work.num_tokens if phase == "query_key_value" else work.num_seqs
    return [
        (last_rows if layer is layers[-1] else work.num_tokens, getattr(layer, name))
        for layer in layers
        for name in names
    ]


def run(
    decoder: NativeDecoder,
    spec: ModelSpec,
    kv_dtype: torch.dtype,
    work: Workload,
    measure_limits: Callable[[], list[float]],
) -> tuple[float, dict[str, float], Roofline]:
    """Seconds of the best step, and of its phases: where each thread has rows of its own, the mean
    of them, so that the rest holds what one helped another and waited for it. And the limits that
    the machine had meanwhile."""
    batch = work.batch()
    num_blocks = batch.block_tables.numel()
    kv_cache = KvCache(
        spec,
        block_size=BLOCK_SIZE,
        num_device_blocks=num_blocks,
        num_host_blocks=0,
        dtype=kv_dtype,
        device=torch.device("cpu"),
        kernels=reference,
    ).device_blocks.fill_(0 if kv_dtype == torch.int8 else 0.01)
    token_ids = torch.arange(work.num_tokens) % spec.vocab_size
    last_rows = batch.query_start[1:].long() - 1
    best, phases = float("inf"), dict.fromkeys(PHASES, 0.0)
    limits = []
    for _ in range(NUM_ROUNDS):
        limits.append(measure_limits())
        for _ in range(NUM_TRIES):
            before = decoder.phase_seconds()
            start_s = time.perf_counter()
            decoder.forward(token_ids, batch, kv_cache, NO_ROWS, last_rows)
            taken_s = time.perf_counter() - start_s
            if taken_s < best:
                after = decoder.phase_seconds()
                best, phases = taken_s, {name: after[name] - before[name] for name in PHASES}
    return best, {**phases, "rest": best - sum(phases.values())}, Roofline.best(limits)


def report(
    weights: DecoderWeights,
    roofline: Roofline,
    work: Workload,
    seconds: dict[str, float],
    position_bytes: float,
    silu_s: float | None,
) -> None:
    """silu_s: see `silu_seconds`; None in float32, where all products are"""
    for phase, taken_s in seconds.items():
        products = products_of(weights, work, phase)
        if phase == "attention" and work.num_read:
            rate = work.num_read * position_bytes / taken_s
            print(
                f"    {phase:17} {taken_s * 1e3:8.2f} ms {rate / 1e9:23.1f} GB/s"
                f" {rate / roofline.bytes_read:5.0%} of the reads"
            )
            continue
        if not products:
            print(f"    {phase:17} {taken_s * 1e3:8.2f} ms")
            continue
        operations = sum(2.0 * rows * m.num_rows * m.num_columns for rows, m in products)
        num_bytes = sum(m.data.nbytes for _, m in products)
        in_8_bits = silu_s is not None and products[0][1].data.dtype == torch.uint8
        bound_s = roofline.seconds(operations, num_bytes, in_8_bits=in_8_bits)
        print(
            f"    {phase:17} {taken_s * 1e3:8.2f} ms {operations / taken_s / 1e9:8.1f} GOP/s"
            f" {num_bytes / taken_s / 1e9:6.1f} GB/s {bound_s / taken_s:5.0%} of the roofline"
        )
        if phase == "gate_up" and in_8_bits and silu_s is not None:
            print(
                f"      without SiLU and quantising, {silu_s * 1e3:.2f} ms alone:"
                f" {bound_s / (taken_s - silu_s):5.0%} of the roofline"
            )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compute", choices=("auto", "float32"), default="auto")
    parser.add_argument("--kv-cache-dtype", choices=KV_DTYPES, default=None)
    arguments = parser.parse_args()
    spec = read_model_spec(arguments.model)
    silu_s: list[float] | list[None] = [None] * len(WORKLOADS)
    if arguments.compute == "auto":
        silu_s = silu_seconds(spec, arguments.threads)
    weights = load_gguf(spec)
    kv_dtype = KV_DTYPES[arguments.kv_cache_dtype or DEFAULT_KV[arguments.compute]]
    start_s = time.perf_counter()
    decoder = load_decoder(
        spec,
        weights,
        compute=arguments.compute,
        kv_dtype=kv_dtype,
        num_threads=arguments.threads,
        max_num_tokens=max(work.num_tokens for work in WORKLOADS),
        block_size=BLOCK_SIZE,
        progress=None,
    )
    if decoder is None:
        raise SystemExit("there is no native decoder here")
    print(f"loaded {spec.name} in {time.perf_counter() - start_s:.2f} s")
    with built("roofline.cpp") as roofline_program:
        for work, work_silu_s in zip(WORKLOADS, silu_s, strict=True):
            taken_s, phases, roofline = run(
                decoder, spec, kv_dtype, work, lambda: roofline_program(arguments.threads)
            )
            print(
                f"{work.name}: {taken_s * 1e3:.2f} ms, {work.num_tokens / taken_s:.0f} tokens/s;"
                f" {arguments.threads} thread(s) read {roofline.bytes_read / 1e9:.1f} GB/s, peaks"
                f" {roofline.octet_operations / 1e9:.0f} GOP/s in 8 bits,"
                f" {roofline.float_operations / 1e9:.0f} GFLOP/s in float32"
            )
            position_bytes = block_bytes(spec, BLOCK_SIZE, kv_dtype) / BLOCK_SIZE
            report(weights, roofline, work, phases, position_bytes, work_silu_s)


if __name__ == "__main__":
    main()
