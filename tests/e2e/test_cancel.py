"""A client that leaves stops its sequence, in any state."""

from __future__ import annotations

import pytest

from tests.e2e.cluster import PATIENCE_S, Cluster, eventually, greedy

STEPS_IN_FLIGHT = 2
STEPS_ON_THE_WAY = 3
"""Steps that may end while the cancel and the count travel, on connections of their own."""


def _steps(cluster: Cluster) -> int:
    return sum(replica.num_steps for replica in cluster.state().replicas)


@pytest.mark.parametrize("num_tokens_first", [0, 1, 3])
def test_a_cancel_frees_the_blocks_within_two_steps(plain: Cluster, num_tokens_first: int) -> None:
    """FIELD-FAILURES, part 2: cancel after 3 of 4096 tokens; IDLE in two steps."""
    call = plain.stub.Generate(greedy([9, 8, 7], 4096), timeout=60)
    received = 0
    while received < num_tokens_first:
        received += len(next(call).delta.token_ids)
    call.cancel()
    steps = _steps(plain)
    eventually(plain.is_idle, PATIENCE_S, "idle after a cancel", plain.tail)
    assert _steps(plain) - steps <= STEPS_IN_FLIGHT + STEPS_ON_THE_WAY


def test_a_cancel_in_the_middle_of_a_long_prompt(plain: Cluster) -> None:
    """FIELD-FAILURES, part 2: cancel in mid-prefill."""
    prompt = [1000 + index * 7 % 30_000 for index in range(4000)]
    call = plain.stub.Generate(greedy(prompt, 8, cache_salt="mid-prefill"), timeout=60)
    eventually(lambda: plain.state().num_running > 0, PATIENCE_S, "the prompt is being computed")
    call.cancel()
    eventually(plain.is_idle, PATIENCE_S, "idle after a cancel", plain.tail)
    assert len(plain.generate(greedy([1, 2, 3], 4)).token_ids) == 4


def test_a_deadline_is_a_cancel(plain: Cluster) -> None:
    for _ in range(3):
        call = plain.stub.Generate(greedy([4, 5, 6], 4096), timeout=0.3)
        with pytest.raises(Exception, match="DEADLINE_EXCEEDED"):
            for _response in call:
                pass
    eventually(plain.is_idle, PATIENCE_S, "idle after three deadlines", plain.tail)
