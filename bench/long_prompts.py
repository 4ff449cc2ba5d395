"""`python -m bench.long_prompts --model FILE`: what long prompts do to streams beside them.

Eight streams decode, and a prompt of 4,000 words arrives every second. This runs twice a round,
in turns: with chunks sized for the target between tokens, as is the default, and with chunking
off, which is a token budget above the prompt and no target. The work is the same, so that the
tokens a second, prompts' and answers' alike, show what chunking costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import uvloop

from bench.load import Trace
from bench.peers import quire
from bench.peers.engine import EngineFailed, Send, Setup
from bench.peers.measure import gaps_during
from bench.peers.scenarios import Scenario
from bench.report import Spread
from bench.workload import Workload

MODES: dict[str, tuple[str, ...]] = {
    "chunked": (),
    "whole": ("--target-itl-ms", "0", "--max-num-batched-tokens", "8192"),
}
"""Options of `quire serve` by mode."""
NUM_STREAMS = 8
FIRST_PROMPT_S = 2.0
"""When the first long prompt comes: the streams decode by then."""
PROMPT_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Figures:
    """One run of one mode."""

    itl_p50_ms: float
    """Between tokens of the streams while a long prompt waits for its first token."""
    itl_p99_ms: float
    itl_max_ms: float
    ttft_ms: float
    """Median over the long prompts."""
    total_tok_s: float
    """Prompt and output tokens of all requests a second, until the last has ended."""


async def drive(send: Send, streams: Workload, long: Workload) -> Figures:
    """Sends both loads to a running server. Raises EngineFailed when a request fails."""
    return figures(*await send_both(send, streams, long, PROMPT_INTERVAL_S))


async def send_both(
    send: Send, streams: Workload, long: Workload, interval_s: float
) -> tuple[Sequence[Trace], Sequence[Trace], float]:
    """Traces of the streams and of the long prompts, and seconds until all have ended."""
    begin_s = time.perf_counter()

    async def later(prompt: str, number: int) -> Trace:
        due_s = begin_s + FIRST_PROMPT_S + number * interval_s
        await asyncio.sleep(due_s - time.perf_counter())
        return await send(prompt, long.max_tokens, due_s)

    decoding = [send(prompt, streams.max_tokens, begin_s) for prompt in streams.prompts()]
    arriving = [later(prompt, number) for number, prompt in enumerate(long.prompts())]
    traces = await asyncio.gather(*decoding, *arriving)
    wall_s = time.perf_counter() - begin_s
    errors = [trace.error for trace in traces if trace.error is not None]
    if errors:
        raise EngineFailed(f"a request failed: {errors[0]}")
    return traces[: len(decoding)], traces[len(decoding) :], wall_s


def figures(streams: Sequence[Trace], long: Sequence[Trace], wall_s: float) -> Figures:
    """Raises EngineFailed when the streams had ended before a long prompt came."""
    itl = Spread.of_seconds(gaps_during(streams, long))
    ttft = Spread.of_seconds(trace.first_token_s for trace in long)
    if itl is None or ttft is None:
        raise EngineFailed("no stream ran while the long prompts came")
    num_tokens = sum(t.num_prompt_tokens + t.num_output_tokens for t in (*streams, *long))
    return Figures(itl.p50, itl.p99, itl.max, ttft.p50, num_tokens / wall_s)


async def measure(
    model: Path, threads: int, mode: str, streams: Workload, long: Workload
) -> Figures:
    """Starts a server in `mode`, warms it up with one long prompt among few tokens, and drives."""
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        scenario = Scenario("long prompts", streams, NUM_STREAMS, long)
        setup = Setup(model, Path(folder), threads, scenario, Path(folder) / "log")
        async with quire.start(setup, MODES[mode]) as send:
            short = Workload(NUM_STREAMS, streams.prompt_words, 0, 48, seed=7)
            one = Workload(1, long.prompt_words, 0, 1, seed=7)
            await send_both(send, short, one, 0.0)
            return await drive(send, streams, long)


def medians(runs: Sequence[Figures]) -> dict[str, float]:
    """The median of each figure."""
    rows = [asdict(run) for run in runs]
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def main() -> None:
    """Prints the medians and their ratios; --json writes all runs."""
    parser = argparse.ArgumentParser(prog="python -m bench.long_prompts", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="GGUF file or folder")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each mode, in turns")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of the worker")
    parser.add_argument("--prompts", type=int, default=8, help="long prompts in a run")
    parser.add_argument("--prompt-words", type=int, default=4000, help="words in each")
    parser.add_argument("--stream-tokens", type=int, default=400, help="tokens of each stream")
    parser.add_argument("--json", type=Path, default=None, help="write all figures to this file")
    args = parser.parse_args()
    streams = Workload(NUM_STREAMS, 32, 0, args.stream_tokens)
    long = Workload(args.prompts, args.prompt_words, 0, 1)
    one_run = partial(measure, args.model, args.threads, streams=streams, long=long)
    runs: dict[str, list[Figures]] = {mode: [] for mode in MODES}
    for number in range(args.rounds):
        for mode in MODES if number % 2 == 0 else reversed(MODES):
            runs[mode].append(uvloop.run(one_run(mode)))
            print(f"round {number + 1} {mode:8}", runs[mode][-1], flush=True)
    chunked, whole = medians(runs["chunked"]), medians(runs["whole"])
    for name, value in chunked.items():
        ratio = value / whole[name]
        print(f"{name:12} chunked {value:10.1f}  whole {whole[name]:10.1f}  ratio {ratio:.3f}")
    if args.json is not None:
        figures_of = {mode: [asdict(run) for run in mode_runs] for mode, mode_runs in runs.items()}
        args.json.write_text(json.dumps(figures_of, indent=2) + "\n")


if __name__ == "__main__":
    main()
