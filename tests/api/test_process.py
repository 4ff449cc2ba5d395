"""The process itself: its ready line, its end by a signal, and how it fails to start."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.quire.inference.v1 import inference_pb2_grpc
from scheduler_svc.__main__ import main
from shared.model_spec import ModelSpec
from tests.api.fake_worker import FakeWorker, continuation, joined, letter_after
from tests.api.serving import SERVING, Answer, error_of, request
from tests.tree import ROOT

READY = re.compile(r"quire scheduler ready: tiny on (\S+), admin on (\S+), workers on (\S+)")


def default_flags(model_folder: Path) -> list[str]:
    ports = ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
    return ["--model", str(model_folder), *ports, "--worker-endpoint", "tcp://127.0.0.1:*"]


def command(model_folder: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "scheduler_svc", *default_flags(model_folder), *flags]


@dataclass
class Process:
    """A running scheduler, with what its ready line said."""

    process: asyncio.subprocess.Process
    address: str
    admin_address: str
    worker_endpoint: str

    async def end(self) -> tuple[int, str]:
        """Its exit code and the rest of what it wrote."""
        _, rest = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, rest.decode()


@contextlib.asynccontextmanager
async def running(model_folder: Path, *flags: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *command(model_folder, *flags), cwd=ROOT, stderr=subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        lines = []
        async for line in process.stderr:
            lines.append(line.decode())
            found = READY.search(lines[-1])
            if found is not None:
                break
        else:
            raise AssertionError("".join(lines))
        yield Process(process, found[1], found[2], found[3])
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def serves(channel: grpc.aio.Channel) -> None:
    """Returns when the scheduler has a worker."""
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    async for answer in watch:
        if answer.status == SERVING:
            watch.cancel()
            return


async def refuses(stub: Any) -> None:
    """Returns when the scheduler, whose worker is held, takes no new request."""
    code = None
    while code is not grpc.StatusCode.UNAVAILABLE:
        code = (await error_of(stub.Generate(request(), timeout=0.5))).code()


async def test_sigterm_lets_streams_complete_and_exits_0(
    model_folder: Path, spec: ModelSpec
) -> None:
    """FIELD-FAILURES part 3: new calls UNAVAILABLE, streams complete within the grace, exit 0."""
    async with running(model_folder) as scheduler:
        worker = FakeWorker(scheduler.worker_endpoint, spec.fingerprint)
        async with joined(worker), grpc.aio.insecure_channel(scheduler.address) as channel:
            stub = inference_pb2_grpc.GenerationServiceStub(channel)
            await serves(channel)
            stream = stub.Generate(request(max_tokens=100)).__aiter__()
            responses = [await anext(stream)]
            worker.hold()
            maps = Path(f"/proc/{scheduler.process.pid}/maps").read_text()
            assert "libtorch" not in maps, "the scheduler is to run without torch"
            scheduler.process.send_signal(signal.SIGTERM)
            await refuses(stub)
            worker.release()
            responses += [response async for response in stream]
            await worker.left.wait()
            code, rest = await scheduler.end()
    assert Answer(responses).token_ids == continuation(b"hello", 100, letter_after)
    assert code == 0, rest


@pytest.mark.parametrize("second_signal", [False, True])
async def test_streams_beyond_the_grace_end_unavailable(
    model_folder: Path, spec: ModelSpec, second_signal: bool
) -> None:
    grace_s = "60" if second_signal else "0.2"
    async with running(model_folder, "--shutdown-grace-s", grace_s) as scheduler:
        worker = FakeWorker(scheduler.worker_endpoint, spec.fingerprint)
        async with joined(worker), grpc.aio.insecure_channel(scheduler.address) as channel:
            stub = inference_pb2_grpc.GenerationServiceStub(channel)
            await serves(channel)
            stream = stub.Generate(request(max_tokens=200)).__aiter__()
            await anext(stream)
            worker.hold()
            scheduler.process.send_signal(signal.SIGTERM)
            if second_signal:
                await refuses(stub)
                scheduler.process.send_signal(signal.SIGTERM)
            error = await error_of(stream)
            code, rest = await scheduler.end()
            worker.release()
            await worker.left.wait()  # it was told to leave though its plans were not answered
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert code == 0, rest


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--listen", "TAKEN"], "--listen: cannot listen at"),
        (["--admin-listen", "TAKEN"], "--admin-listen: cannot listen at"),
        (["--worker-endpoint", "tcp://TAKEN"], "cannot listen at tcp://"),
        (["--nonsense"], "--nonsense"),
        (["--model", "nowhere"], "nowhere"),
        (["--model", "BROKEN"], "broken.gguf"),
    ],
)
def test_a_start_that_cannot_work_is_one_sentence_and_code_2(
    model_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    words: str,
) -> None:
    """FIELD-FAILURES part 3: a bad model path: the cause is printed."""
    monkeypatch.setattr("shared.logs.setup", lambda *_: None)  # the log of this process is pytest's
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no model")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = [flag.replace("TAKEN", address).replace("BROKEN", str(broken)) for flag in flags]
        code = main([*default_flags(model_folder), *flags])
    output = capsys.readouterr().err
    (sentence,) = output.splitlines()
    assert code == 2
    assert sentence.startswith("quire scheduler: ")
    assert words in sentence


async def test_a_failed_start_is_the_exit_code_of_the_process(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *command(tmp_path / "nowhere"), cwd=ROOT, stderr=subprocess.PIPE
    )
    _, output = await process.communicate()
    assert process.returncode == 2
    assert output.decode().splitlines() == [
        f"quire scheduler: there is no model at {tmp_path / 'nowhere'}"
    ]
