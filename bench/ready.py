"""`python -m bench.ready --model FILE`: how long `quire serve` takes until it serves, by parts.

    command ... running ......... listening ... joined ... ready .... first token
                both processes    scheduler     worker     the line   of a prompt sent then

A start is watched from outside, and seldom, as looking takes time from it. The first prompt beside
a later one tells whether work was put off until after the line that says that it is ready.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import grpc

from bench.front import cpu_seconds, rss_mib
from bench.peers.engine import free_port
from protos.quire.admin.v1 import admin_pb2, admin_pb2_grpc
from protos.quire.inference.v1 import inference_pb2, inference_pb2_grpc

POLL_S = 0.02
"""Between two looks at a process, a port or a file; ASK_S is between two calls."""
ASK_S = 0.05
START_LIMIT_S = 120.0
PROMPTS = ("Why is the sky blue?", "How do whales sleep?")
"""Of about as many tokens."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One start. Seconds count from the command; processor time and memory are as of ready_s."""

    running_s: float
    """Scheduler and worker run their modules."""
    listening_s: float
    """The scheduler's ports are open."""
    joined_s: float
    """The worker has registered: what it imports is there, its weights are not."""
    ready_s: float
    """`quire serve` says that it is ready."""
    first_token_s: float
    """A token of the first prompt is there."""
    first_prompt_ms: float
    later_prompt_ms: float
    """From a prompt to its first token."""
    scheduler_cpu_s: float
    worker_cpu_s: float
    scheduler_rss_mib: float
    worker_rss_mib: float


class Starting:
    """A `quire serve` with one worker from the moment of its command on; stops it at the end."""

    def __init__(self, model: Path, options: Sequence[str], log: Path) -> None:
        self._log = log
        self.port, self.admin_port = free_port(), free_port()
        command = [sys.executable, "-m", "cli", "serve", "--model", str(model), *options]
        command += ["--listen", f"127.0.0.1:{self.port}"]
        command += ["--admin-listen", f"127.0.0.1:{self.admin_port}"]
        self._begin_s = time.monotonic()
        with log.open("w") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def __enter__(self) -> Starting:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def until(self, look: Callable[[], bool], pause_s: float = POLL_S) -> float:
        """Seconds from the command until `look` is true; SystemExit when the start fails."""
        while not look():
            late = time.monotonic() > self._begin_s + START_LIMIT_S
            if late or self._process.poll() is not None:
                raise SystemExit(f"it does not become ready: {self._log.read_text()}")
            time.sleep(pause_s)
        return time.monotonic() - self._begin_s

    def modules(self) -> Mapping[str, int]:
        """The ids of its processes by the modules that they run."""
        thread = Path(f"/proc/{self._process.pid}/task/{self._process.pid}")
        return {_module(pid): int(pid) for pid in (thread / "children").read_text().split()}

    def listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.admin_port)):
            return True
        return False

    def said_ready(self) -> bool:
        return "Quire is ready" in self._log.read_text()


def _module(pid: str) -> str:
    """M of a process `python -m M`; empty where it is none, or is gone."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return ""
    return arguments[2] if arguments[1:2] == ["-m"] else ""


def watch(model: Path, options: Sequence[str], log: Path) -> Figures:
    """One start, from the command to the first tokens."""
    with (
        Starting(model, options, log) as start,
        grpc.insecure_channel(f"127.0.0.1:{start.admin_port}") as admin,
        grpc.insecure_channel(f"127.0.0.1:{start.port}") as api,
    ):
        operator = admin_pb2_grpc.AdminServiceStub(admin)

        def has_worker() -> bool:
            request = admin_pb2.ListWorkersRequest()
            return len(operator.ListWorkers(request, timeout=START_LIMIT_S).workers) > 0

        running_s = start.until(lambda: start.modules().keys() >= {"scheduler_svc", "worker_svc"})
        pids = [start.modules()[module] for module in ("scheduler_svc", "worker_svc")]
        listening_s = start.until(start.listens)
        joined_s = start.until(has_worker, ASK_S)
        ready_s = start.until(start.said_ready)
        taken = [*map(cpu_seconds, pids), *map(rss_mib, pids)]
        client = inference_pb2_grpc.GenerationServiceStub(api)
        first_s, later_s = (_first_token_s(client, prompt) for prompt in PROMPTS)
    times_s = (running_s, listening_s, joined_s, ready_s, ready_s + first_s)
    return Figures(*times_s, 1000 * first_s, 1000 * later_s, *taken)


def _first_token_s(client: inference_pb2_grpc.GenerationServiceStub, prompt: str) -> float:
    """Seconds until the first token of a prompt, all of whose answer is read."""
    stopping = inference_pb2.StoppingParams(max_tokens=8, ignore_eos=True)
    begin_s = time.monotonic()
    responses = client.Generate(inference_pb2.GenerateRequest(text=prompt, stopping=stopping))
    arrived_s = [time.monotonic() for response in responses if response.HasField("delta")]
    return arrived_s[0] - begin_s


def over(starts: Sequence[Figures], choose: Callable[[Iterable[float]], float]) -> Figures:
    """What `choose` makes of all starts, figure by figure."""
    names = [field.name for field in fields(Figures)]
    return Figures(*(choose([getattr(start, name) for start in starts]) for name in names))


def main() -> None:
    """Prints each start, the medians and the least; --json writes all starts."""
    parser = argparse.ArgumentParser(prog="python -m bench.ready", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="GGUF file or folder")
    parser.add_argument("--starts", type=int, default=5, help="after one that warms caches")
    parser.add_argument("--json", type=Path, default=None, help="write all figures to this file")
    parser.add_argument("options", nargs="*", help="of `quire serve`, after --")
    args = parser.parse_args()
    starts = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "serve.log"
        watch(args.model, args.options, log)
        for number in range(args.starts):
            starts.append(watch(args.model, args.options, log))
            print(f"start {number + 1}", _told(starts[-1]), flush=True)
    print("medians", _told(over(starts, statistics.median)))
    print("least", _told(over(starts, min)), f"at a load of {os.getloadavg()[0]:.1f}")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps([asdict(start) for start in starts], indent=2) + "\n")


def _told(figures: Figures) -> str:
    return json.dumps({name: round(value, 3) for name, value in asdict(figures).items()})


if __name__ == "__main__":
    main()
