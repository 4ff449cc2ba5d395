"""The native CPU decoder against this machine's limits, phase by phase.

    python -m bench.kernels --model PATH [--threads 2] [--compute auto|float32]
        [--kv-cache-dtype float32|bfloat16|int8]

For steps of several kinds, prints tokens a second and, per phase, milliseconds, operations and
weight bytes a second, and the share of the roofline: the larger of bytes / read bandwidth and
operations / peak, both measured first; of attention in steps that decode, the bytes of keys and
values a second. Every figure is the best of several steps.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels import reference
from kernels.cpu import NativeDecoder, load_decoder
from kernels.cpu.library import PHASES
from kernels.decoder import NO_ROWS, DecoderWeights, LayerWeights, StoredMatrix
from kernels.interface import AttentionBatch
from shared.model_files import read_model_spec
from shared.model_spec import ModelSpec
from worker_svc.kv_cache import KvCache, block_bytes
from worker_svc.weights.gguf import load_gguf

BLOCK_SIZE = 16
NUM_TRIES = 12
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


def measure_roofline(num_threads: int) -> Roofline:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "roofline"
        source = Path(__file__).with_name("roofline.cpp")
        flags = ["-O2", "-std=c++17", "-mavx2", "-mfma", "-pthread"]
        subprocess.run(["g++", *flags, str(source), "-o", str(program)], check=True)
        done = subprocess.run(
            [program, str(num_threads)], check=True, capture_output=True, text=True
        )
    return Roofline(*map(float, done.stdout.split()))


def matrices_of(weights: DecoderWeights, phase: str) -> list[StoredMatrix]:
    if phase == "logits":
        return [weights.output or weights.embedding]
    names = MATRICES_OF_PHASES.get(phase, ())
    layers: list[LayerWeights] = list(weights.layers)
    return [getattr(layer, name) for layer in layers for name in names]


def run(
    decoder: NativeDecoder, spec: ModelSpec, kv_dtype: torch.dtype, work: Workload
) -> tuple[float, dict[str, float]]:
    """Seconds of the best step, and of its phases: where each thread has rows of its own, the mean
    of them, so that the rest holds what one helped another and waited for it."""
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
    for _ in range(NUM_TRIES):
        before = decoder.phase_seconds()
        start_s = time.perf_counter()
        decoder.forward(token_ids, batch, kv_cache, NO_ROWS, last_rows)
        taken_s = time.perf_counter() - start_s
        if taken_s < best:
            after = decoder.phase_seconds()
            best, phases = taken_s, {name: after[name] - before[name] for name in PHASES}
    return best, {**phases, "rest": best - sum(phases.values())}


def report(
    weights: DecoderWeights,
    roofline: Roofline,
    work: Workload,
    seconds: dict[str, float],
    auto: bool,
    position_bytes: float,
) -> None:
    for phase, taken_s in seconds.items():
        matrices = matrices_of(weights, phase)
        if phase == "attention" and work.num_read:
            rate = work.num_read * position_bytes / taken_s
            print(
                f"    {phase:17} {taken_s * 1e3:8.2f} ms {rate / 1e9:23.1f} GB/s"
                f" {rate / roofline.bytes_read:5.0%} of the reads"
            )
            continue
        if not matrices:
            print(f"    {phase:17} {taken_s * 1e3:8.2f} ms")
            continue
        num_rows = work.num_seqs if phase == "logits" else work.num_tokens
        operations = sum(2.0 * num_rows * m.num_rows * m.num_columns for m in matrices)
        num_bytes = sum(m.data.nbytes for m in matrices)
        in_8_bits = auto and matrices[0].data.dtype == torch.uint8
        bound_s = roofline.seconds(operations, num_bytes, in_8_bits=in_8_bits)
        print(
            f"    {phase:17} {taken_s * 1e3:8.2f} ms {operations / taken_s / 1e9:8.1f} GOP/s"
            f" {num_bytes / taken_s / 1e9:6.1f} GB/s {bound_s / taken_s:5.0%} of the roofline"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compute", choices=("auto", "float32"), default="auto")
    parser.add_argument("--kv-cache-dtype", choices=KV_DTYPES, default=None)
    arguments = parser.parse_args()
    roofline = measure_roofline(arguments.threads)
    print(
        f"{arguments.threads} thread(s): reads {roofline.bytes_read / 1e9:.1f} GB/s, peaks"
        f" {roofline.octet_operations / 1e9:.0f} GOP/s in 8 bits,"
        f" {roofline.float_operations / 1e9:.0f} GFLOP/s in float32"
    )
    spec = read_model_spec(arguments.model)
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
    for work in WORKLOADS:
        taken_s, phases = run(decoder, spec, kv_dtype, work)
        print(f"{work.name}: {taken_s * 1e3:.2f} ms, {work.num_tokens / taken_s:.0f} tokens/s")
        position_bytes = block_bytes(spec, BLOCK_SIZE, kv_dtype) / BLOCK_SIZE
        report(weights, roofline, work, phases, arguments.compute == "auto", position_bytes)


if __name__ == "__main__":
    main()
