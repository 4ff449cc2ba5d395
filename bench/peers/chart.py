"""A chart of peers.json; runs in the peers' venv, which has matplotlib.

python -m bench.peers.chart peers.json peers.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # before pyplot: there is no display
from matplotlib import pyplot

PANELS = (
    ("tok_s", "output tokens/s, more is better"),
    ("ttft_ms", "first token, ms, less is better"),
    ("itl_p99_ms", "between tokens, p99, ms, less is better"),
)


def draw(figures: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    """One panel for each figure. Scenarios differ by orders of magnitude: bars are as high as the
    figures beside the first engine's, and labelled with the figures themselves."""
    scenarios = list(figures)
    engines = list(dict.fromkeys(engine for one in figures.values() for engine in one))
    width = 0.8 / len(engines)
    figure, panels = pyplot.subplots(len(PANELS), 1, figsize=(9, 9), layout="constrained")
    for panel, (key, title) in zip(panels, PANELS, strict=True):
        for place, engine in enumerate(engines):
            at = [
                (index + place * width, figures[name][engine][key], _first(figures[name])[key])
                for index, name in enumerate(scenarios)
                if engine in figures[name]
            ]
            heights = [value / unit for _, value, unit in at]
            bars = panel.bar([x for x, _, _ in at], heights, width, label=engine)
            panel.bar_label(bars, labels=[f"{value:.0f}" for _, value, _ in at], fontsize=8)
        panel.set(title=title, ylabel=f"{engines[0]} = 1")
        panel.set_xticks([i + 0.4 - width / 2 for i in range(len(scenarios))], scenarios)
        panel.margins(y=0.2)
    bars_and_names = panels[0].get_legend_handles_labels()
    figure.legend(*bars_and_names, ncols=len(engines), loc="outside upper center")
    pyplot.savefig(path, dpi=120)


def _first(of_engines: dict[str, dict[str, float]]) -> dict[str, float]:
    return next(iter(of_engines.values()))


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
