"""Random worlds keep every promise; and a planted defect is seen."""

from __future__ import annotations

import pytest

from tests.sim.beam_defects import BEAM_DEFECTS
from tests.sim.defects import DEFECTS, Defect
from tests.sim.score_defects import SCORE_DEFECTS
from tests.sim.simulator import Simulator

NUM_EVENTS = 300
ALL_DEFECTS = (*DEFECTS, *BEAM_DEFECTS, *SCORE_DEFECTS)
MAX_SEEDS_TO_SEE = 60


@pytest.mark.parametrize("seed", range(100))
def test_a_random_world_keeps_every_promise(seed: int) -> None:
    """FIELD-FAILURES, part 1: a sequence scheduled and preempted in the same step stays in the
    plan; one appears twice; the budget is exceeded (fuzz).

    Replay: `make sim SEED=S SEEDS=1 EVENTS=300`
    """
    Simulator(seed).run(NUM_EVENTS)


@pytest.mark.parametrize(
    "defect", [*DEFECTS, *BEAM_DEFECTS, *SCORE_DEFECTS], ids=lambda defect: defect.__name__
)
def test_a_planted_defect_is_seen(defect: Defect, monkeypatch: pytest.MonkeyPatch) -> None:
    defect(monkeypatch)
    for seed in range(MAX_SEEDS_TO_SEE):
        try:
            Simulator(seed).run(NUM_EVENTS)
        except (AssertionError, KeyError, ValueError, IndexError):
            return
    pytest.fail(f"{MAX_SEEDS_TO_SEE} seeds saw nothing")
