"""Measures Quire beside its peers:

    bench/peers/setup.sh && python -m bench.peers --rounds 3

Each engine is alone on the machine while it is measured: start, warm-up, measurement, end. The
rounds go through all engines in turn, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from bench.peers import llama_server, openvino, quire, vllm
from bench.peers.engine import EngineFailed, Setup, Start
from bench.peers.measure import measure
from bench.peers.results import Results
from bench.peers.scenarios import SCENARIOS

ENGINES: dict[str, Start] = {
    "quire": quire.start,
    "llama-server": llama_server.start,
    "openvino": openvino.start,
    "vllm": vllm.start,
}
CACHE = Path.home() / ".cache" / "quire"


def main(
    rounds: Annotated[int, typer.Option(min=1, help="measurements of each")] = 3,
    workloads: Annotated[str, typer.Option(help="names with commas")] = ",".join(SCENARIOS),
    engines: Annotated[str, typer.Option(help="names with commas")] = ",".join(ENGINES),
    model: Annotated[Path, typer.Option(envvar="QUIRE_MODEL", help="GGUF file")] = (
        CACHE / "SmolLM2-135M-Instruct.Q4_1.gguf"
    ),
    peers: Annotated[
        Path, typer.Option(envvar="QUIRE_PEERS", help="where bench/peers/setup.sh put the peers")
    ] = CACHE / "peers",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each engine")] = (
        os.cpu_count() or 1
    ),
    out: Annotated[Path, typer.Option(help="folder for peers.json, peers.md and peers.png")] = Path(
        "bench/results"
    ),
) -> None:
    """Run all engines on all workloads, round by round, and compare."""
    chosen = _chosen(workloads, SCENARIOS, "--workloads")
    names = _chosen(engines, ENGINES, "--engines")
    console = Console(highlight=False)
    results = Results(names)
    with tempfile.TemporaryDirectory(prefix="quire-peers-") as logs:
        for turn in range(rounds):
            order = names[turn % len(names) :] + names[: turn % len(names)]
            for scenario in chosen:
                for engine in order:
                    log = Path(logs) / f"{engine}.log"
                    setup = Setup(model, peers, threads, SCENARIOS[scenario], log)
                    _measure(console, results, f"{turn + 1}/{rounds}", engine, setup)
    about = f"{model.name}, CPU threads: {threads}, medians of rounds: {rounds}"
    figures = results.write(out, about)
    _show(console, list(results.rows()), about)
    if results.medians():
        _draw(peers, figures)


def _measure(console: Console, results: Results, turn: str, engine: str, setup: Setup) -> None:
    """One measurement. An engine that fails is told, and missing in the tables."""
    name = setup.scenario.name
    try:
        figures = uvloop.run(measure(ENGINES[engine], setup))
    except EngineFailed as error:
        console.print(f"{turn} {name} {engine}: {error}", markup=False, soft_wrap=True)
        return
    results.add(name, engine, figures)
    console.print(
        f"{turn} {name} {engine}: {figures.tok_s:.1f} tokens/s, first token {figures.ttft_ms:.0f} "
        f"ms, between tokens {figures.itl_p50_ms:.1f} ms, p99 {figures.itl_p99_ms:.1f} ms "
        f"({figures.num_prompt_tokens} prompt tokens, load {os.getloadavg()[0]:.1f})",
        markup=False,
        soft_wrap=True,
    )


def _chosen(names: str, known: Collection[str], option: str) -> list[str]:
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in chosen if name not in known] or not chosen:
        raise typer.BadParameter(f"{unknown} is none of {', '.join(known)}", param_hint=option)
    return chosen


def _show(console: Console, rows: Sequence[Sequence[str]], about: str) -> None:
    table = Table(title=about, box=None)
    for heading in rows[0]:
        table.add_column(heading, justify="right" if heading in rows[0][2:] else "left")
    for row in rows[1:]:
        table.add_row(*row)
    console.print(table)


def _draw(peers: Path, figures: Path) -> None:
    """The chart, where the peers' venv with its matplotlib is."""
    python = peers / "openvino" / "bin" / "python"
    if python.exists():
        chart = figures.with_suffix(".png")
        subprocess.run([python, "-m", "bench.peers.chart", figures, chart], check=True)


if __name__ == "__main__":
    typer.run(main)
