"""`quire bench`: puts a seeded load on a server and tells how it did."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Annotated

import grpc
import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.load import Sender, Trace, run_closed, run_open
from bench.report import Report, Spread
from bench.workload import Workload
from cli.connection import (
    DEFAULT_SERVER,
    ModelOption,
    ServerOption,
    TlsCaOption,
    TokenFileOption,
    connect,
    server_config,
)
from cli.errors import EXIT_USAGE, CommandError
from cli.models import served_model
from protos.quire.admin.v1 import admin_pb2, admin_pb2_grpc
from quire_client import ClientConfig

ADMIN_TIMEOUT_S = 5.0


def bench(
    server: ServerOption = DEFAULT_SERVER,
    tls_ca: TlsCaOption = None,
    client_token_file: TokenFileOption = None,
    model: ModelOption = "",
    admin: Annotated[
        str,
        typer.Option(
            envvar="QUIRE_ADMIN", help="host:port of the operator's API; for the scheduler's share"
        ),
    ] = "127.0.0.1:50052",
    clients: Annotated[int, typer.Option(min=1, help="requests at a time, without --rate")] = 8,
    requests: Annotated[int, typer.Option(min=1, help="requests in all")] = 64,
    prompt_words: Annotated[int, typer.Option(min=1, help="words in each prompt")] = 64,
    shared_words: Annotated[
        int, typer.Option(min=0, help="first words that all prompts share")
    ] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="tokens of each answer, exactly")] = 64,
    mixed: Annotated[
        bool, typer.Option(help="lengths from an eighth of these up to them, by the seed")
    ] = False,
    rate: Annotated[
        float | None,
        typer.Option(help="requests a second, arriving by chance whatever still runs (open loop)"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="same seed, same prompts and arrivals")] = 0,
    warmup: Annotated[int, typer.Option(min=0, help="requests before the clock starts")] = 2,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="write all figures to this file")
    ] = None,
) -> None:
    """Measure throughput and latency under a seeded load."""
    if shared_words > prompt_words:
        raise CommandError("--shared-words is larger than --prompt-words", EXIT_USAGE)
    if rate is not None and not 0 < rate < float("inf"):
        raise CommandError("--rate must be a number above 0", EXIT_USAGE)
    workload = Workload(requests, prompt_words, shared_words, max_tokens, seed, mixed)
    target = server_config(server, tls_ca, client_token_file)
    with connect(target) as client:
        name = served_model(client, model).name
    traces, wall_s = uvloop.run(_load(target, model, workload, clients, rate, warmup))
    report = Report.of_traces(traces, wall_s, _engine_state(admin, target))
    how = f"{clients} clients" if rate is None else f"{rate:g} requests/s"
    _print(report, f"{name}: {requests} requests, {how}, {prompt_words} words, {max_tokens} tokens")
    if json_file is not None:
        settings = {
            "model": name,
            "clients": clients if rate is None else None,
            "rate": rate,
            "prompt_words": prompt_words,
            "shared_words": shared_words,
            "max_tokens": max_tokens,
            "mixed": mixed,
            "seed": seed,
        }
        _write(json_file, {**settings, **report.as_json()})
    if report.num_failed:
        raise CommandError(
            f"{report.num_failed} of {requests} requests failed; the first: {report.first_error}"
        )


async def _load(
    target: ClientConfig,
    model: str,
    workload: Workload,
    clients: int,
    rate: float | None,
    warmup: int,
) -> tuple[list[Trace], float]:
    """Warms up with prompts of another seed, so that nothing measured is cached, then runs."""
    columns = (TextColumn("load"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    async with target.aio_channel() as channel:
        sender = Sender(channel, model, target.metadata)
        if warmup:
            words = workload.prompt_words
            cold = Workload(warmup, words, 0, workload.max_tokens, workload.seed + 1_000_003)
            await run_closed(sender, cold.jobs(), min(clients, warmup), lambda: None)
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("load", total=workload.num_requests)
            begin_s = time.perf_counter()
            if rate is None:
                traces = await run_closed(
                    sender, workload.jobs(), clients, lambda: progress.advance(task)
                )
            else:
                traces = await run_open(
                    sender,
                    workload.jobs(),
                    workload.arrivals_s(rate),
                    lambda: progress.advance(task),
                )
            return traces, time.perf_counter() - begin_s


def _engine_state(admin: str, target: ClientConfig) -> admin_pb2.GetEngineStateResponse | None:
    """None when the operator's port can't be reached from here; it is often closed to clients."""
    channel = grpc.insecure_channel(admin)
    with channel, contextlib.suppress(grpc.RpcError):
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        state: admin_pb2.GetEngineStateResponse = stub.GetEngineState(
            admin_pb2.GetEngineStateRequest(), metadata=target.metadata, timeout=ADMIN_TIMEOUT_S
        )
        return state
    return None


def _print(report: Report, title: str) -> None:
    table = Table("", "p50", "p99", "mean", "max", box=None)
    rows = (
        ("time to first token, ms", report.ttft_ms),
        ("between tokens, ms", report.itl_ms),
        ("whole request, ms", report.request_ms),
    )
    for name, spread in rows:
        table.add_row(name, *_cells(spread))
    console = Console(highlight=False)
    console.print(title, style="bold")
    console.print(
        f"output {report.output_tok_s:.1f} tokens/s, prompts {report.prompt_tok_s:.1f} tokens/s "
        f"({report.num_cached_tokens} of {report.num_prompt_tokens} cached), "
        f"{report.requests_s:.2f} requests/s in {report.wall_s:.1f} s, {report.num_failed} failed"
    )
    console.print(table)
    if (share := report.scheduler) is not None:
        console.print(
            f"per step: {share.schedule_ms:.3f} ms scheduling, {share.execute_ms:.3f} ms executing "
            f"({100 * share.share:.1f}% scheduling)"
        )


def _cells(spread: Spread | None) -> list[str]:
    if spread is None:
        return ["-"] * 4
    return [f"{value:.1f}" for value in (spread.p50, spread.p99, spread.mean, spread.max)]


def _write(path: Path, figures: dict[str, object]) -> None:
    try:
        path.write_text(json.dumps(figures, indent=2) + "\n")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}", EXIT_USAGE) from error
