"""From measurements to medians, tables and files."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from bench.peers.measure import Figures

OURS = "quire"
SHOWN = {
    "tok_s": ("output tokens/s", True),
    "ttft_ms": ("first token, ms", False),
    "itl_p99_ms": ("between tokens, p99, ms", False),
}
"""Figures of the table: heading, and whether more is better."""


@dataclass(slots=True)
class Results:
    """All measurements of a run, by scenario and engine."""

    engines: Sequence[str]
    _measured: dict[str, dict[str, list[Figures]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    def add(self, scenario: str, engine: str, figures: Figures) -> None:
        self._measured[scenario][engine].append(figures)

    def medians(self) -> dict[str, dict[str, dict[str, float]]]:
        """{scenario: {engine: {figure: median over rounds}}}; with the range of tok_s, which tells
        how calm the machine was."""
        return {
            scenario: {engine: _medians(rounds) for engine, rounds in engines.items()}
            for scenario, engines in self._measured.items()
        }

    def rows(self) -> Iterator[list[str]]:
        """Table cells: scenario, figure, each engine's median, and how much better Quire is than
        the best peer (above 1 is better, for latencies too)."""
        yield ["workload", "", *self.engines, f"{OURS} : best peer"]
        for scenario, engines in self.medians().items():
            for key, (heading, more_is_better) in SHOWN.items():
                values = {engine: figures[key] for engine, figures in engines.items()}
                cells = [f"{values[e]:.1f}" if e in values else "-" for e in self.engines]
                yield [scenario, heading, *cells, _ratio(values, more_is_better)]

    def write(self, folder: Path, about: str) -> Path:
        """Writes peers.json and peers.md, and returns the first."""
        folder.mkdir(parents=True, exist_ok=True)
        figures = folder / "peers.json"
        figures.write_text(json.dumps(self.medians(), indent=2) + "\n")
        (folder / "peers.md").write_text(f"{about}\n\n{markdown(list(self.rows()))}\n")
        return figures


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table of GitHub's Markdown; the first row is its head, numbers stand to the right."""
    head, *body = rows
    rule = ["---", "---", *("---:" for _ in head[2:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *body))


def _medians(rounds: Sequence[Figures]) -> dict[str, float]:
    columns = [asdict(figures) for figures in rounds]
    speeds = [figures.tok_s for figures in rounds]
    return {
        **{key: median(column[key] for column in columns) for key in columns[0]},
        "tok_s_min": min(speeds),
        "tok_s_max": max(speeds),
        "num_rounds": len(rounds),
    }


def _ratio(values: dict[str, float], more_is_better: bool) -> str:
    peers = [value for engine, value in values.items() if engine != OURS]
    if OURS not in values or not peers:
        return "-"
    ours = values[OURS]
    return f"{ours / max(peers) if more_is_better else min(peers) / ours:.2f}"
