"""`python -m tests.core.step_cost [N ...]`: what a steady decode step of N sequences costs the
scheduler, in microseconds of its thread's time, blocks of 16 tokens at their boundaries included.
"""

from __future__ import annotations

import argparse
import time
from collections import deque

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import ReplicaCapacity
from scheduler_svc.core.scheduler import Scheduler
from shared.plan import StepPlan, StepResult
from tests.core.driver import R1, make_request

WARM_UP_STEPS = 80
MEASURED_STEPS = 320
SPREAD = 16


def answer(plan: StepPlan) -> StepResult:
    """A result that fits `plan`."""
    chunks = zip(plan.chunk_handles, plan.chunk_samples, strict=True)
    handles = [*plan.decode_handles, *(handle for handle, samples in chunks if samples)]
    return StepResult(plan.step, handles, [7] * len(handles))


def measure(num_seqs: int) -> tuple[list[float], list[float]]:
    """Sorted seconds of schedule and of apply_result, with two plans in flight."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=num_seqs, max_num_batched_tokens=1 << 14, max_waiting=num_seqs
        ),
        b"measured",
    )
    num_blocks = num_seqs * 40
    scheduler.replica_joined(R1, ReplicaCapacity(num_blocks, 0, 16, 1 << 14, num_seqs))
    for number in range(num_seqs):
        request = make_request(f"r{number}", 100 + number % SPREAD, 500, eos=[99])
        scheduler.submit(request, 0.0)
    plans: deque[StepPlan] = deque()
    schedule_s, apply_s = [], []
    for _ in range(WARM_UP_STEPS + MEASURED_STEPS):
        started_s = time.thread_time()
        plan, _ = scheduler.schedule(R1, 0.0)
        schedule_s.append(time.thread_time() - started_s)
        assert plan is not None
        plans.append(plan)
        if len(plans) == 2:
            result = answer(plans.popleft())
            started_s = time.thread_time()
            scheduler.apply_result(R1, result, 0.0)
            apply_s.append(time.thread_time() - started_s)
    assert scheduler.num_running == num_seqs
    return sorted(schedule_s[WARM_UP_STEPS:]), sorted(apply_s[WARM_UP_STEPS:])


def main() -> None:
    """Print median and least cost for each number of sequences."""
    parser = argparse.ArgumentParser(prog="python -m tests.core.step_cost", description=__doc__)
    parser.add_argument("num_seqs", nargs="*", type=int, default=[256, 1024])
    for num_seqs in parser.parse_args().num_seqs:
        for name, costs_s in zip(("schedule", "apply_result"), measure(num_seqs), strict=True):
            median, least = costs_s[len(costs_s) // 2] * 1e6, costs_s[0] * 1e6
            print(f"{num_seqs:5} sequences  {name:12}  median {median:6.0f}  least {least:6.0f}")


if __name__ == "__main__":
    main()
