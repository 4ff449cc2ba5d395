"""The bench of a start, on a real one."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path
from statistics import median

from bench.ready import over, watch


def test_a_start_passes_its_milestones_in_order(model_path: Path, tmp_path: Path) -> None:
    start = watch(model_path, ("--num-blocks", "64"), tmp_path / "serve.log")
    milestones_s = astuple(start)[:5]
    assert list(milestones_s) == sorted(milestones_s)
    assert all(figure > 0 for figure in astuple(start))
    assert over([start], median) == start
