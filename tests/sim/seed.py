"""One seed of the simulator, as processes that run many side by side call it."""

from __future__ import annotations

import traceback

from tests.sim.simulator import Simulator


def simulate(num_events: int, seed: int) -> tuple[int, dict[str, int], str]:
    """One seed: what happened in it, and the error that ended it or nothing."""
    simulator = Simulator(seed)
    try:
        simulator.run(num_events)
    except Exception:
        return seed, dict(simulator.tally), traceback.format_exc()
    counters = simulator.scheduler.counters
    tally = dict(simulator.tally) | {
        "preemptions": counters.preemptions,
        "prefix_hit_tokens": counters.prefix_hit_tokens,
    }
    return seed, tally, ""
