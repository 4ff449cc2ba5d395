"""`python -m tests.sim --seeds N [--seed S] [--events E] [--jobs J]`: run or replay simulations.

A seed that fails is printed with its error and the command that replays it alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from tests.sim.seed import simulate


def main() -> int:
    """Run the seeds from S on and print what happened in them; the exit status tells of errors."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--events", type=int, default=300, help="events in each run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    args = parser.parse_args()
    seeds = range(args.seed, args.seed + args.seeds)
    total: Counter[str] = Counter()
    failed = []
    with ProcessPoolExecutor(min(args.jobs, args.seeds), get_context("spawn")) as pool:
        for seed, tally, error in pool.map(partial(simulate, args.events), seeds, chunksize=4):
            total.update(tally)
            if error:
                failed.append(seed)
                print(f"seed {seed} failed:\n{error}", file=sys.stderr)
                replay = f"python -m tests.sim --seed {seed} --events {args.events}"
                print(f"replay: {replay}", file=sys.stderr, flush=True)
    for name, count in sorted(total.items()):
        print(f"{name:24} {count:8}")
    print(f"{len(seeds)} seeds x {args.events} events: {len(failed)} failed {failed or ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
