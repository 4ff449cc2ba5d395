"""What each part of the design brings: the same loads, with one part more in each mode.

    python -m bench.ablation --model FILE [--rounds 3] [--json ablation.json]

    one by one           one request at a time; its KV cache is one piece, as long as the longest
                         request that the server takes
    paged                one at a time, its KV cache in blocks of 16 tokens
    continuous batching  requests join and leave a running batch; a prompt is computed in one step
    chunked prefill      prompts in chunks, sized for the time between tokens
    run-ahead            a step is planned while the last one runs: the default

Throughput, memory and the wait for the first token are those of eight clients with short prompts;
the time between tokens is that of eight streams beside which prompts of 2,000 words arrive. No two
prompts begin alike, so that the prefix cache has no part in it. Memory is watched in a run of its
own: questions twenty times a second cost a twentieth of the tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import uvloop

from bench.peers import quire
from bench.peers.engine import Setup
from bench.peers.measure import drive, figures
from bench.peers.scenarios import Scenario
from bench.workload import Workload
from protos.quire.admin.v1 import admin_pb2, admin_pb2_grpc
from shared.model_files import read_model_spec
from shared.model_spec import ModelSpec

LONGEST_TOKENS = 4096
"""Tokens of the longest request that the servers take."""
BLOCK_SIZE = 16
POLL_S = 0.05
KV_ELEMENT_BYTES = 2
"""The KV cache is kept in bfloat16."""
REST_S = 3.0
"""Before the measured run, in which a server may get the memory that its cache needs next."""
CHAT = Scenario("chat", Workload(32, 16, 0, 128), num_clients=8)
WATCHED = Scenario("watched", Workload(16, 16, 0, 128, seed=1), num_clients=8)
"""The same load, of other prompts."""
LONG_AMONG = Scenario("long", Workload(8, 32, 0, 320), 8, long=Workload(3, 2000, 0, 1))
ONE_AT_A_TIME = ("--max-num-seqs", "1")
WHOLE_PROMPTS = ("--target-itl-ms", "0", "--max-num-batched-tokens", str(LONGEST_TOKENS))


@dataclass(frozen=True, slots=True)
class Mode:
    """How a server runs."""

    options: tuple[str, ...]
    """Of `quire serve`."""
    block_size: int = BLOCK_SIZE
    run_ahead: bool = False

    @property
    def num_blocks(self) -> int:
        """Room for all that both loads run at one time."""
        return (CHAT.num_clients + 2) * LONGEST_TOKENS // self.block_size


MODES = {
    "one by one": Mode((*ONE_AT_A_TIME, *WHOLE_PROMPTS), block_size=LONGEST_TOKENS),
    "paged": Mode((*ONE_AT_A_TIME, *WHOLE_PROMPTS)),
    "continuous batching": Mode(WHOLE_PROMPTS),
    "chunked prefill": Mode(()),
    "run-ahead": Mode((), run_ahead=True),
}


@dataclass(frozen=True, slots=True)
class Figures:
    """One run of one mode."""

    tok_s: float
    """Output tokens a second of eight clients."""
    ttft_p50_ms: float
    kv_mib: float
    """The most KV cache that running requests held at one time."""
    itl_p99_ms: float
    """Between tokens of the streams, while a long prompt waits for its first."""


async def measure(model: Path, threads: int, mode: Mode) -> Figures:
    """Starts a server in `mode` and sends both loads. Raises EngineFailed."""
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        setup = Setup(model, Path(folder), threads, CHAT, Path(folder) / "log")
        options = (*mode.options, "--num-blocks", str(mode.num_blocks))
        environment = {
            "QUIRE_BLOCK_SIZE": str(mode.block_size),
            "QUIRE_KV_CACHE_DTYPE": "bfloat16",
            "QUIRE_HANG_TIMEOUT_S": "300",
            "QUIRE_RUN_AHEAD": "on" if mode.run_ahead else "off",
        }
        async with quire.serve(setup, options, environment) as server:
            await drive(server.send, CHAT.warm_up(), long_after_s=0.0)
            async with _watch_blocks(server.admin) as held:
                await drive(server.send, WATCHED, long_after_s=0.0)
            await asyncio.sleep(REST_S)
            begin_s = asyncio.get_running_loop().time()
            chat, _ = await drive(server.send, CHAT, long_after_s=0.0)
            wall_s = asyncio.get_running_loop().time() - begin_s
            streams, long = await drive(server.send, LONG_AMONG, long_after_s=2.0)
    of_chat = figures(chat, [], wall_s)
    num_bytes = max(held) * mode.block_size * _bytes_per_token(read_model_spec(model))
    return Figures(
        tok_s=of_chat.tok_s,
        ttft_p50_ms=of_chat.ttft_ms,
        kv_mib=num_bytes / (1 << 20),
        itl_p99_ms=figures(streams, long, 1.0).itl_p99_ms,
    )


@contextlib.asynccontextmanager
async def _watch_blocks(admin: grpc.aio.Channel) -> AsyncIterator[list[int]]:
    """Within the context, blocks that requests hold are noted several times a second."""
    stub = admin_pb2_grpc.AdminServiceStub(admin)
    held: list[int] = []

    async def watch() -> None:
        while True:
            state = await stub.GetEngineState(admin_pb2.GetEngineStateRequest())
            held.append(
                sum(r.num_blocks - r.num_free_blocks - r.num_cached_blocks for r in state.replicas)
            )
            await asyncio.sleep(POLL_S)

    task = asyncio.create_task(watch())
    try:
        yield held
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _bytes_per_token(spec: ModelSpec) -> int:
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * KV_ELEMENT_BYTES


def medians(runs: Sequence[Figures]) -> Figures:
    """The median of each figure."""
    rows = [asdict(run) for run in runs]
    return Figures(**{name: statistics.median(row[name] for row in rows) for name in rows[0]})


def table(by_mode: dict[str, Figures]) -> str:
    """GitHub's Markdown; the ratios are to the first mode."""
    first = next(iter(by_mode.values()))
    lines = [
        "| mode | output tokens/s | by the first | first token, median | KV held | "
        "between tokens, p99 |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for mode, row in by_mode.items():
        lines.append(
            f"| {mode} | {row.tok_s:.1f} | {row.tok_s / first.tok_s:.2f} | {row.ttft_p50_ms:.0f} ms"
            f" | {row.kv_mib:.1f} MiB | {row.itl_p99_ms:.0f} ms |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.ablation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="GGUF file or folder")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each mode, in turns")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of the worker")
    parser.add_argument("--json", type=Path, default=None, help="write all figures to this file")
    args = parser.parse_args()
    runs: dict[str, list[Figures]] = {mode: [] for mode in MODES}
    for number in range(args.rounds):
        for name, mode in MODES.items():
            runs[name].append(uvloop.run(measure(args.model, args.threads, mode)))
            print(f"round {number + 1} {name}: {runs[name][-1]}", flush=True)
    print(table({name: medians(mode_runs) for name, mode_runs in runs.items()}))
    if args.json is not None:
        figures_of = {name: [asdict(run) for run in mode_runs] for name, mode_runs in runs.items()}
        args.json.write_text(json.dumps(figures_of, indent=2) + "\n")


if __name__ == "__main__":
    main()
