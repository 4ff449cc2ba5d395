"""`python -m bench.peers` compares engines, and its files and tables say what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench.peers import __main__ as command
from bench.peers.measure import Figures
from bench.peers.results import Results, markdown
from tests.bench.traces import engine, steady


def figures(tok_s: float, ttft_ms: float = 10.0) -> Figures:
    return Figures(tok_s, ttft_ms, ttft_ms, 1.0, 2.0, 3)


def results() -> Results:
    made = Results(["quire", "slow", "absent"])
    for tok_s in (100.0, 300.0, 110.0):
        made.add("chat", "quire", figures(tok_s, ttft_ms=20.0))
    made.add("chat", "slow", figures(55.0, ttft_ms=10.0))
    return made


def test_the_median_of_the_rounds_counts() -> None:
    ours = results().medians()["chat"]["quire"]
    assert (ours["tok_s"], ours["tok_s_min"], ours["tok_s_max"]) == (110.0, 100.0, 300.0)
    assert ours["num_rounds"] == 3


def test_a_ratio_above_one_is_better_for_speeds_and_for_latencies() -> None:
    _, speed, first_token, _ = results().rows()
    assert speed == ["chat", "output tokens/s", "110.0", "55.0", "-", "2.00"]
    assert first_token == ["chat", "first token, ms", "20.0", "10.0", "-", "0.50"]


def test_without_quire_there_is_no_ratio() -> None:
    alone = Results(["slow"])
    alone.add("chat", "slow", figures(55.0))
    assert [row[-1] for row in alone.rows()][1:] == ["-"] * 3


def test_the_markdown_table() -> None:
    assert markdown([["a", "b", "c"], ["1", "2", "3"]]) == (
        "| a | b | c |\n| --- | --- | ---: |\n| 1 | 2 | 3 |"
    )


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    made = typer.Typer()
    made.command()(command.main)
    monkeypatch.setitem(command.ENGINES, "quire", engine(steady))
    return made


def test_a_run_writes_figures_and_goes_on_past_an_engine_that_fails(
    app: typer.Typer, tmp_path: Path
) -> None:
    options = ["--rounds", "2", "--workloads", "chat_1", "--engines", "quire,llama-server"]
    places = ["--peers", str(tmp_path), "--out", str(tmp_path / "out")]
    ended = CliRunner().invoke(app, [*options, *places])
    assert ended.exit_code == 0, ended.output
    assert "cannot run" in ended.output, "llama-server is not set up here"
    written = json.loads((tmp_path / "out" / "peers.json").read_text())
    assert set(written["chat_1"]) == {"quire"}
    assert written["chat_1"]["quire"]["ttft_ms"] == pytest.approx(10)
    assert written["chat_1"]["quire"]["num_rounds"] == 2
    assert "| chat_1 | output tokens/s |" in (tmp_path / "out" / "peers.md").read_text()


@pytest.mark.parametrize("option", ["--engines", "--workloads"])
@pytest.mark.parametrize("names", ["nobody", ""])
def test_an_unknown_name_is_refused(app: typer.Typer, option: str, names: str) -> None:
    ended = CliRunner().invoke(app, [option, names])
    assert ended.exit_code == 2 and "is none of" in ended.output
