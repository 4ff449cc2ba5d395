"""A scheduler and its workers as real processes, for a test to use, kill and restart."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.quire.admin.v1 import admin_pb2, admin_pb2_grpc
from protos.quire.inference.v1 import inference_pb2, inference_pb2_grpc
from tests.tree import ROOT

READY_S = 90.0
PATIENCE_S = 40.0
"""For what the product does at once, on a machine that may be very busy."""


@dataclass
class Answer:
    """What one stream gave."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    started: inference_pb2.Started | None = None
    finished: inference_pb2.Finished | None = None
    num_recoveries: int = 0

    def add(self, response: inference_pb2.GenerateResponse) -> None:
        """Takes one event; a stream that loses or doubles a token fails here."""
        event = response.WhichOneof("event")
        if event == "started":
            assert self.started is None, "a second Started"
            self.started = response.started
        elif event == "delta":
            assert response.delta.offset == len(self.token_ids), "a token is lost or doubled"
            self.token_ids.extend(response.delta.token_ids)
            self.text += response.delta.text
        elif event == "recovered":
            assert response.recovered.offset == len(self.token_ids)
            self.num_recoveries += 1
        elif event == "finished":
            assert self.finished is None, "a second Finished"
            self.finished = response.finished


def greedy(
    token_ids: Sequence[int], num_tokens: int, cache_salt: str = ""
) -> inference_pb2.GenerateRequest:
    """A request for exactly `num_tokens` most likely tokens."""
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=token_ids),
        sampling=inference_pb2.SamplingParams(temperature=0.0),
        stopping=inference_pb2.StoppingParams(max_tokens=num_tokens, ignore_eos=True),
        cache_salt=cache_salt,
    )


class Process:
    """One process whose output goes to a file."""

    def __init__(self, module: str, arguments: Sequence[str], log: Path) -> None:
        self.log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def exit_code(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout_s: float) -> int:
        return self._process.wait(timeout_s)

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])


class Cluster:
    """A scheduler on free ports of this machine, and workers that reach it over ipc."""

    def __init__(
        self, model: Path, scheduler_flags: Sequence[str] = (), worker_flags: Sequence[str] = ()
    ) -> None:
        self._model = model
        self._worker_flags = worker_flags
        # not pytest's folder: the path of an ipc socket must stay under 108 bytes
        self._directory = Path(tempfile.mkdtemp(prefix="quire-e2e-"))
        self._endpoint = f"ipc://{self._directory}/workers.sock"
        self.address, self.admin_address = free_address(), free_address()
        self._scheduler_flags = scheduler_flags
        self.scheduler = self.start_scheduler()
        self.workers: list[Process] = []
        self.channel = grpc.insecure_channel(self.address)
        self._admin_channel = grpc.insecure_channel(self.admin_address)
        self.stub = inference_pb2_grpc.GenerationServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self._admin_channel)

    def start_scheduler(self) -> Process:
        """Starts the scheduler: the first one, or the successor of one that ended."""
        self.scheduler = Process(
            "scheduler_svc",
            [
                *("--model", str(self._model), "--worker-endpoint", self._endpoint),
                *("--listen", self.address, "--admin-listen", self.admin_address),
                *self._scheduler_flags,
            ],
            self._directory / "scheduler.log",
        )
        return self.scheduler

    def add_worker(self) -> Process:
        """Starts one more worker, and does not wait for it."""
        index = len(self.workers)
        worker = Process(
            "worker_svc",
            [
                *("--model", str(self._model), "--scheduler-endpoint", self._endpoint),
                *("--worker-id", f"worker-{index}", "--exit-with-parent"),
                *self._worker_flags,
            ],
            self._directory / f"worker-{index}.log",
        )
        self.workers.append(worker)
        return worker

    def wait_ready(self, num_workers: int) -> None:
        """Until exactly so many workers take plans."""

        def ready() -> bool:
            for process in (self.scheduler, *self.workers):
                code = process.exit_code()
                assert code in (None, -signal.SIGKILL), f"exit code {code}: {process.tail()}"
            return self.num_ready() == num_workers

        eventually(ready, READY_S, f"{num_workers} ready workers", self.tail)

    def num_ready(self) -> int:
        with contextlib.suppress(grpc.RpcError):
            workers = self.admin.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=5.0).workers
            return sum(worker.state == admin_pb2.WORKER_STATE_READY for worker in workers)
        return -1

    def generate(self, request: inference_pb2.GenerateRequest, timeout_s: float = 300.0) -> Answer:
        """Streams one answer to its end. Raises grpc.RpcError."""
        answer = Answer()
        for response in self.stub.Generate(request, timeout=timeout_s):
            answer.add(response)
        assert answer.started is not None and answer.finished is not None
        return answer

    def sequences(self, request: inference_pb2.GenerateRequest) -> list[Answer]:
        """Streams the choices or beams of one request to their ends; in order of their index."""
        answers: dict[int, Answer] = defaultdict(Answer)
        for response in self.stub.Generate(request, timeout=90.0):
            answers[response.sequence_index].add(response)
        assert all(answer.finished is not None for answer in answers.values())
        return [answers[index] for index in sorted(answers)]

    def generate_all(
        self, requests: Sequence[inference_pb2.GenerateRequest], at_once: int
    ) -> list[Answer]:
        """All requests, up to `at_once` at a time, in order."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(self.generate, requests))

    @contextlib.contextmanager
    def running(self, requests: Sequence[inference_pb2.GenerateRequest]) -> Iterator[list[Answer]]:
        """Streams all requests; inside, the answers grow; at the end all have ended."""
        answers = [Answer() for _ in requests]

        def stream(answer: Answer, request: inference_pb2.GenerateRequest) -> None:
            for response in self.stub.Generate(request, timeout=300.0):
                answer.add(response)

        with ThreadPoolExecutor(len(requests)) as pool:
            streams: list[Future[None]] = [
                pool.submit(stream, answer, request)
                for answer, request in zip(answers, requests, strict=True)
            ]
            yield answers
            for running in streams:
                running.result()

    def state(self) -> admin_pb2.GetEngineStateResponse:
        state: admin_pb2.GetEngineStateResponse = self.admin.GetEngineState(
            admin_pb2.GetEngineStateRequest(), timeout=5.0
        )
        return state

    def is_idle(self) -> bool:
        """All queues are empty, and every block is free or a cached prefix."""
        state = self.state()
        return state.num_waiting + state.num_running + state.num_swapped == 0 and all(
            replica.num_free_blocks + replica.num_cached_blocks == replica.num_blocks
            for replica in state.replicas
        )

    def health(self) -> int:
        response = health_pb2_grpc.HealthStub(self.channel).Check(
            health_pb2.HealthCheckRequest(), timeout=5.0
        )
        return int(response.status)

    def tail(self) -> str:
        """The end of every process's output, for a failure's message."""
        processes = (self.scheduler, *self.workers)
        return "\n".join(f"--- {process.log.name}\n{process.tail()}" for process in processes)

    def close(self) -> None:
        self.channel.close()
        self._admin_channel.close()
        for process in (self.scheduler, *self.workers):
            if process.exit_code() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
        shutil.rmtree(self._directory, ignore_errors=True)


def free_address() -> str:
    """An address of this machine that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def eventually(
    holds: Callable[[], bool], within_s: float, what: str, more: Callable[[], str] = str
) -> float:
    """Waits until `holds()`; gives the seconds it took. Fails after `within_s`."""
    begin_s = time.monotonic()
    while not holds():
        assert time.monotonic() - begin_s < within_s, f"not within {within_s} s: {what}\n{more()}"
        time.sleep(0.02)
    return time.monotonic() - begin_s


def model_file() -> Path:
    """The model that `make model` gets."""
    default = Path.home() / ".cache/quire/SmolLM2-135M-Instruct.Q4_1.gguf"
    return Path(os.environ.get("QUIRE_TEST_MODEL", default))
