"""`quire serve`: a scheduler and its workers on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from cli.cores import share_cores, share_threads
from cli.errors import EXIT_INTERRUPTED, EXIT_USAGE, CommandError
from cli.scheduler_options import PolicyOption, PreemptionOption, RecordOption, TargetItlOption
from cli.supervisor import Fleet, Supervisor
from shared.endpoint import MAX_PORT

POLL_S = 0.1
COMMAND_STOP_S = 10.0
CONNECT_TIMEOUT_S = 1.0
REMOTE_ONLY = ("QUIRE_TLS_CERT", "QUIRE_TOKEN_FILE", "QUIRE_ADMIN_TOKEN_FILE")
"""Settings of a scheduler that others reach; `serve` would not get through to its own."""

KvCacheDtypeOption = Annotated[
    str | None, typer.Option(help="of the KV cache: auto, float32, bfloat16, float16 or int8")
]


@dataclass(slots=True)
class Stop:
    """Counts the signals that asked for an end: the first lets streams complete, the second not."""

    num_signals: int = 0

    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.num_signals += 1

    def asked(self) -> bool:
        return self.num_signals > 0

    def at_once(self) -> bool:
        return self.num_signals > 1


def serve(
    model: Annotated[Path, typer.Option(envvar="QUIRE_MODEL", help="GGUF file, or model folder")],
    command: Annotated[
        list[str] | None,
        typer.Argument(help="run this once the server is ready, then stop (after --)"),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="worker processes")] = 1,
    listen: Annotated[
        str, typer.Option(help="host:port of the gRPC API; port 0 takes a free one")
    ] = "127.0.0.1:50051",
    admin_listen: Annotated[
        str, typer.Option(help="host:port of the operator's API; port 0 takes a free one")
    ] = "127.0.0.1:50052",
    model_name: Annotated[str | None, typer.Option(help="the model's name for clients")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="auto, float32, bfloat16 or float16; auto is the fastest")
    ] = None,
    kv_cache_dtype: KvCacheDtypeOption = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of all workers together")
    ] = None,
    pin_workers: Annotated[bool, typer.Option(help="give each worker cores of its own")] = False,
    kv_memory: Annotated[float | None, typer.Option(help="GiB of KV cache for each worker")] = None,
    num_blocks: Annotated[
        int | None, typer.Option(min=1, help="KV cache blocks of each worker, instead of GiB")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="sequences in one step")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="tokens in one step")
    ] = None,
    max_waiting: Annotated[int | None, typer.Option(min=1, help="requests that may wait")] = None,
    preemption: PreemptionOption = None,
    policy: PolicyOption = None,
    target_itl_ms: TargetItlOption = None,
    record: RecordOption = None,
    shutdown_grace_s: Annotated[
        float, typer.Option(min=0, help="seconds that streams may take at the end")
    ] = 30.0,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error")] = "warning",
) -> None:
    """Run a scheduler and workers on this machine."""
    _refuse_remote_settings()
    listen, admin_listen = _with_port(listen), _with_port(admin_listen)
    with _runtime_directory() as directory:
        endpoint = f"ipc://{directory}/workers.sock"
        both = _flags(
            model=model.expanduser().absolute(),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            log_level=log_level,
        )
        scheduler = _flags(
            listen=listen,
            admin_listen=admin_listen,
            worker_endpoint=endpoint,
            model_name=model_name,
            max_waiting=max_waiting,
            preemption=preemption,
            policy=policy,
            target_itl_ms=target_itl_ms,
            record=record,
            shutdown_grace_s=shutdown_grace_s,
        )
        worker = _flags(
            scheduler_endpoint=endpoint,
            device=device,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            kv_memory=kv_memory,
            num_blocks=num_blocks,
        )
        fleet = Fleet(
            [*both, *scheduler],
            [[*both, *worker, *own] for own in _own_flags(workers, threads, pin_workers)],
            shutdown_grace_s,
        )
        code = _run(fleet, _Addresses(listen, admin_listen), command or ())
    raise SystemExit(code)


def _refuse_remote_settings() -> None:
    for variable in REMOTE_ONLY:
        if os.environ.get(variable):
            raise CommandError(
                f"{variable} is set, but `quire serve` serves this machine alone; start "
                "`python -m scheduler_svc` and `python -m worker_svc` by themselves instead",
                EXIT_USAGE,
            )


@dataclass(frozen=True, slots=True)
class _Addresses:
    listen: str
    admin: str


def _run(fleet: Fleet, addresses: _Addresses, command: Sequence[str]) -> int:
    console = Console(stderr=True, highlight=False)

    def report(sentence: str) -> None:
        console.print(sentence, markup=False, soft_wrap=True)

    supervisor = Supervisor(fleet, lambda name, line: report(f"{name} | {line}"), report)
    stop = Stop()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop.on_signal)
    try:
        supervisor.start()

        def goes_on() -> bool:
            supervisor.check()
            return not stop.asked()

        num_workers = len(fleet.worker_arguments)
        _wait_until_listening(addresses.admin, goes_on)
        # Only now: where cores are few, importing gRPC takes time from the processes' own start.
        from cli.loading import wait_until_ready

        if not wait_until_ready(addresses.admin, num_workers, goes_on, console):
            return EXIT_INTERRUPTED
        supervisor.service_began()
        report(
            f"Quire is ready: gRPC at {addresses.listen}, operator's API at {addresses.admin}, "
            f"{num_workers} worker{'s' if num_workers > 1 else ''}. Ctrl-C stops it."
        )
        if command:
            return _run_command(command, supervisor, addresses, stop)
        while not stop.asked():
            supervisor.check()
            time.sleep(POLL_S)
        return 0
    finally:
        if stop.asked():
            report("Stopping; open streams may complete. Ctrl-C again stops at once.")
        supervisor.stop(stop.at_once)


def _wait_until_listening(address: str, goes_on: Callable[[], bool]) -> None:
    host, _, port = address.rpartition(":")
    while goes_on():
        with contextlib.suppress(OSError):
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
            return
        time.sleep(POLL_S)


def _run_command(
    command: Sequence[str], supervisor: Supervisor, addresses: _Addresses, stop: Stop
) -> int:
    """Runs `command` with the server's addresses in its environment; its exit code is ours."""
    environment = {**os.environ, "QUIRE_SERVER": addresses.listen, "QUIRE_ADMIN": addresses.admin}
    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as error:
        raise CommandError(f"cannot run {command[0]}: {error.strerror}", EXIT_USAGE) from error
    try:
        while (code := process.poll()) is None and not stop.asked():
            supervisor.check()
            time.sleep(POLL_S)
        return EXIT_INTERRUPTED if code is None else code
    finally:
        _end_command(process, stop)


def _end_command(process: subprocess.Popen[bytes], stop: Stop) -> None:
    """Asks the command to end; kills it after COMMAND_STOP_S, or at once on a second signal."""
    if process.poll() is None:
        process.terminate()
    deadline_s = time.monotonic() + COMMAND_STOP_S
    while process.poll() is None:
        if stop.at_once() or time.monotonic() > deadline_s:
            process.kill()
            process.wait()
            return
        time.sleep(POLL_S)


def _own_flags(num_workers: int, threads: int | None, pin: bool) -> list[list[str]]:
    """What each worker is told alone."""
    shares = share_threads(threads, num_workers)
    cores = share_cores(shares) if pin else [None] * num_workers
    return [
        _flags(worker_id=f"worker-{index}", threads=share, cpus=own)
        for index, (share, own) in enumerate(zip(shares, cores, strict=True))
    ]


def _flags(**values: object) -> list[str]:
    """max_num_seqs=8 becomes --max-num-seqs 8; None is left out."""
    flags = []
    for name, value in values.items():
        if value is not None:
            flags += [f"--{name.replace('_', '-')}", str(value)]
    return flags


def _with_port(address: str) -> str:
    """`address` with a free port in place of port 0."""
    host, separator, port = address.rpartition(":")
    is_ipv6 = ":" in host
    if not separator or not port.isdigit():
        raise CommandError(f"{address} is no host:port", EXIT_USAGE)
    if int(port) > MAX_PORT:
        raise CommandError(f"{address}: ports end at {MAX_PORT}", EXIT_USAGE)
    if is_ipv6 and not (host.startswith("[") and host.endswith("]")):
        raise CommandError(f"{address} should be [{host}]:{port}", EXIT_USAGE)
    if port != "0":
        return address
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    try:
        with socket.create_server((host.strip("[]"), 0), family=family) as probe:
            return f"{host}:{probe.getsockname()[1]}"
    except OSError as error:
        raise CommandError(f"cannot listen on {host}: {error.strerror}", EXIT_USAGE) from error


@contextlib.contextmanager
def _runtime_directory() -> Iterator[Path]:
    """A private folder for the workers' socket, gone at the end."""
    directory = Path(tempfile.mkdtemp(prefix="quire-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
