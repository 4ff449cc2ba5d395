"""The ablation's table is made of medians, and its ratios are to the first mode."""

from __future__ import annotations

from bench.ablation import MODES, Figures, medians, table


def test_the_table_has_the_medians_of_each_mode() -> None:
    naive = medians(
        [
            Figures(10.0, 900.0, 90.0, 20.0),
            Figures(12.0, 800.0, 90.0, 30.0),
            Figures(11.0, 700.0, 90.0, 10.0),
        ]
    )
    assert naive == Figures(11.0, 800.0, 90.0, 20.0)
    batched = Figures(44.0, 100.0, 25.0, 4000.0)
    rows = table({"one by one": naive, "continuous batching": batched}).split("\n")
    assert rows[2] == "| one by one | 11.0 | 1.00 | 800 ms | 90.0 MiB | 20 ms |"
    assert rows[3] == "| continuous batching | 44.0 | 4.00 | 100 ms | 25.0 MiB | 4000 ms |"


def test_each_mode_has_room_for_the_same_tokens() -> None:
    assert len({mode.num_blocks * mode.block_size for mode in MODES.values()}) == 1
