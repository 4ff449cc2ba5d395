"""The states of a sequence: what the table allows, and nothing else."""

from __future__ import annotations

import itertools

import pytest

from scheduler_svc.core.states import IllegalTransition, SequenceState, check_transition

W, R, S, F = SequenceState
LEGAL = {(W, R), (W, F), (R, W), (R, S), (R, F), (S, R), (S, W), (S, F)}


@pytest.mark.parametrize(("current", "target"), list(itertools.product(SequenceState, repeat=2)))
def test_only_the_ways_of_the_table_are_open(current: SequenceState, target: SequenceState) -> None:
    if (current, target) in LEGAL:
        check_transition(current, target)
        return
    with pytest.raises(IllegalTransition, match=f"{current.value} to {target.value}"):
        check_transition(current, target)
