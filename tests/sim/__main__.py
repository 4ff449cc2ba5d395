"""`python -m tests.sim --seeds N [--seed S] [--events E]`: run or replay simulations."""

from __future__ import annotations

import argparse
from collections import Counter

from tests.sim.simulator import Simulator


def main() -> None:
    """Run the seeds from S on and print what happened in them."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--events", type=int, default=300, help="events in each run")
    args = parser.parse_args()
    total: Counter[str] = Counter()
    for seed in range(args.seed, args.seed + args.seeds):
        simulator = Simulator(seed)
        try:
            simulator.run(args.events)
        except BaseException:
            print(f"seed {seed} failed", flush=True)
            raise
        total.update(simulator.tally)
        total["preemptions"] += simulator.scheduler.counters.preemptions
        total["prefix_hit_tokens"] += simulator.scheduler.counters.prefix_hit_tokens
    for name, count in sorted(total.items()):
        print(f"{name:24} {count:8}")


if __name__ == "__main__":
    main()
