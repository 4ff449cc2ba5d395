"""`python -m bench.front --model FILE`: what the front adds to a token's way, and what it costs.

    paced workers --- results ---> scheduler --- gRPC streams ---> this process
      note when each is sent       is measured                     notes when each token is received

The scheduler is a real process; workers without a model answer at a set rate, in processes of their
own. The delay of a token is from the worker's sending it to the arrival at the client's socket, on
the same clock. With --sparse some further streams run on a worker of their own, at --sparse-steps a
second: they are idle before each of their tokens, beside streams that flow.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from bench.raw_streams import RawStreams, StreamEnded
from bench.report import Spread
from protos.quire.inference.v1 import inference_pb2
from shared.model_files import read_model_spec
from shared.model_spec import ModelSpec

METHOD = "/quire.inference.v1.GenerationService/Generate"
READY = re.compile(r"scheduler ready: .* on (\S+), admin on (\S+), workers on (\S+)")
WARM_UP_S = 1.0
START_LIMIT_S = 60.0
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the front."""

    streams: int
    tokens_per_s: float
    """Of all streams together, without the sparse ones."""
    connections: int
    sparse: int
    sparse_steps_per_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Figures:
    """One run. Times are in milliseconds."""

    tokens_per_s: float
    messages_per_s: float
    cpu_share: float
    """Seconds of processor time of the whole scheduler process for each second: 1 is one core."""
    cpu_us_per_message: float
    cpu_us_per_token: float
    rss_mib: float
    delay_ms: Spread | None
    sparse_delay_ms: Spread | None


@contextlib.contextmanager
def scheduler(model: Path, load: Load) -> Iterator[tuple[int, str, str]]:
    """A scheduler process: its id, its address and where workers connect."""
    num_streams = load.streams + load.sparse
    flags = ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
    flags += ["--worker-endpoint", "tcp://127.0.0.1:*", "--max-num-seqs", str(load.streams)]
    flags += ["--no-replica-grace-s", "30"]  # workers join meanwhile
    flags += ["--max-streams", str(num_streams), "--max-waiting", str(num_streams)]
    command = [sys.executable, "-m", "scheduler_svc", "--model", str(model), *flags]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log)
        try:
            while (found := READY.search(_content(log))) is None:
                if process.poll() is not None:
                    raise SystemExit(_content(log))
                time.sleep(0.05)
            yield process.pid, found[1], found[3]
        except StreamEnded as error:
            raise SystemExit(f"{error}\n{_content(log)}") from error
        finally:
            process.kill()
            process.wait()


def _content(log: TextIO) -> str:
    log.seek(0)
    return log.read()


class WorkerProcess:
    """A paced worker whose tokens are all its own."""

    def __init__(
        self, spec: ModelSpec, endpoint: str, number: int, num_seqs: int, steps_per_s: float
    ) -> None:
        num_blocks = num_seqs * (2 + spec.context_length // BLOCK_SIZE)
        first_token = spec.vocab_size // 100  # most special tokens come before
        self._num_tokens = (spec.vocab_size - first_token) // 2
        self._first_token = first_token + number * self._num_tokens
        options = {
            "scheduler-endpoint": endpoint,
            "fingerprint": spec.fingerprint,
            "worker-id": f"paced-{number}",
            "steps-per-s": steps_per_s,
            "max-num-seqs": num_seqs,
            "num-blocks": num_blocks,
            "first-token": self._first_token,
            "num-tokens": self._num_tokens,
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.paced_worker", *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

        assert self._process.stdout is not None
        self._process.stdout.readline()  # it has joined

    def end(self) -> dict[int, float]:
        """Ends it; gives when it sent each of its tokens. A run is shorter than its tokens."""
        output, _ = self._process.communicate()
        steps = {int(step): sent_s for step, sent_s in json.loads(output).items()}
        assert len(steps) <= self._num_tokens, "the run is too long for this vocabulary"
        return {self._first_token + s % self._num_tokens: sent_s for s, sent_s in steps.items()}

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def request(number: int, max_tokens: int) -> bytes:
    """A request of a short prompt that no other has."""
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[number // 200, number % 200, 1, 2]),
        stopping=inference_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
    ).SerializeToString()


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def read_until(streams: RawStreams, end_s: float) -> None:
    while (left_s := end_s - time.monotonic()) > 0:
        streams.read(left_s)


def measure(model: Path, load: Load) -> Figures:
    """One run: start, let all streams flow, read for the set time."""
    spec = read_model_spec(model)
    with scheduler(model, load) as (pid, address, endpoint), contextlib.ExitStack() as stack:
        steps_per_s = load.tokens_per_s / load.streams
        workers = [WorkerProcess(spec, endpoint, 0, load.streams, steps_per_s)]
        if load.sparse:
            sparse_rate = load.sparse_steps_per_s
            workers.append(WorkerProcess(spec, endpoint, 1, load.sparse, sparse_rate))
        for worker in workers:
            stack.callback(worker.kill)
        streams = RawStreams(address, METHOD, load.connections)
        stack.callback(streams.close)
        _open_all(streams, load, spec.context_length - BLOCK_SIZE)
        cpu_s, start_s = cpu_seconds(pid), time.monotonic()
        read_until(streams, start_s + load.seconds)
        end_s = time.monotonic()
        cpu_s, memory_mib = cpu_seconds(pid) - cpu_s, rss_mib(pid)
        sent_s = [worker.end() for worker in workers]
        received = [
            (received_s, token_ids)
            for received_s, token_ids in _deltas(streams)
            if start_s <= received_s < end_s
        ]
    return _figures(received, sent_s, cpu_s, end_s - start_s, memory_mib)


def _open_all(streams: RawStreams, load: Load, max_tokens: int) -> None:
    """Opens every stream, and returns when each has had its first token for a while."""
    deadline_s = time.monotonic() + START_LIMIT_S
    streams.read(1.0)  # the server's settings
    num_streams = load.streams + load.sparse
    for number in range(num_streams):
        streams.open(request(number, max_tokens))
    while streams.num_with_frames(2) < num_streams:
        if time.monotonic() > deadline_s:
            raise SystemExit(f"of {num_streams} streams not all began in {START_LIMIT_S:g} s")
        read_until(streams, time.monotonic() + 0.2)
    read_until(streams, time.monotonic() + WARM_UP_S)


def _deltas(streams: RawStreams) -> Iterator[tuple[float, Sequence[int]]]:
    """(time of receipt, token ids) of each Delta, with a check that none is lost or doubled."""
    num_tokens: dict[int, int] = {}
    for received_s, call, data in streams.messages():
        response = inference_pb2.GenerateResponse.FromString(data)
        if response.HasField("delta"):
            assert response.delta.offset == num_tokens.get(call, 0), "tokens lost or doubled"
            num_tokens[call] = response.delta.offset + len(response.delta.token_ids)
            yield received_s, response.delta.token_ids


def _figures(
    received: Sequence[tuple[float, Sequence[int]]],
    sent_s: Sequence[dict[int, float]],
    cpu_s: float,
    wall_s: float,
    memory_mib: float,
) -> Figures:
    delays_s = [
        [
            received_s - sent[token]
            for received_s, token_ids in received
            for token in token_ids
            if token in sent
        ]
        for sent in sent_s
    ]
    num_tokens = sum(map(len, delays_s))
    return Figures(
        tokens_per_s=num_tokens / wall_s,
        messages_per_s=len(received) / wall_s,
        cpu_share=cpu_s / wall_s,
        cpu_us_per_message=1e6 * cpu_s / len(received),
        cpu_us_per_token=1e6 * cpu_s / num_tokens,
        rss_mib=memory_mib,
        delay_ms=Spread.of_seconds(delays_s[0]),
        sparse_delay_ms=Spread.of_seconds(delays_s[1]) if len(delays_s) > 1 else None,
    )


def main() -> None:
    """Prints each run; --json writes them all."""
    parser = argparse.ArgumentParser(prog="python -m bench.front", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="GGUF file or folder")
    parser.add_argument("--streams", type=int, default=200, help="streams that flow")
    parser.add_argument("--tokens-per-s", type=float, default=20_000.0, help="of all together")
    parser.add_argument("--connections", type=int, default=8, help="HTTP/2 connections")
    parser.add_argument("--sparse", type=int, default=4, help="further streams, mostly idle")
    parser.add_argument("--sparse-steps", type=float, default=5.0, help="their tokens a second")
    parser.add_argument("--seconds", type=float, default=10.0, help="measured time of a run")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None, help="write all figures to this file")
    args = parser.parse_args()
    load = Load(
        args.streams,
        args.tokens_per_s,
        args.connections,
        args.sparse,
        args.sparse_steps,
        args.seconds,
    )
    runs = []
    for number in range(args.runs):
        runs.append(asdict(measure(args.model, load)))
        print(f"run {number + 1}", json.dumps(runs[-1]), flush=True)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"load": asdict(load), "runs": runs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
