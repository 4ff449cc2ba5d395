"""What scheduling alone costs, with workers that answer at once:

    python -m bench.scheduler --running 1024 --waiting 100000 --json bench/results/scheduler.json

N sequences decode on one replica with two plans in flight, and M requests wait. Prompts differ in
length, so that the N / 16 sequences whose block is full differ from step to step; the prefix cache
is on, so that full blocks are hashed and published. A step is one `schedule` and one
`apply_result`, in microseconds of the thread's own time.
"""

from __future__ import annotations

import json
import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import NewRequest, ReplicaCapacity
from scheduler_svc.core.prefix_index import BlockHasher, token_bytes
from scheduler_svc.core.scheduler import Scheduler
from shared.ids import ReplicaId, RequestId
from shared.plan import StepPlan, StepResult
from shared.sampling import SamplingParams

REPLICA = ReplicaId(1)
BLOCK_SIZE = 16
PROMPT_TOKENS = 100
WARM_UP_STEPS = 64
HASHED_BLOCKS = 2000
WASTE_REQUESTS = 1000
WASTE_RUNNING = 64
EOS = 2


class FakeWorker:
    """Answers plans in order, each sequence with one token of its own."""

    def __init__(self) -> None:
        self.plans: deque[StepPlan] = deque()
        self.num_computed: dict[int, int] = {}
        """Slots that each sequence has filled."""

    def answer(self) -> StepResult:
        """The result of the oldest plan."""
        plan = self.plans.popleft()
        chunks = zip(plan.chunk_handles, plan.chunk_samples, strict=True)
        handles = [*plan.decode_handles, *(handle for handle, samples in chunks if samples)]
        return StepResult(plan.step, handles, [1000 + handle for handle in handles])

    def count_slots(self, plan: StepPlan) -> None:
        """Keep `num_computed` as it is after `plan`."""
        for handle in plan.finished_handles:
            del self.num_computed[handle]
        for start in plan.starts:
            self.num_computed[start.handle] = start.num_computed_tokens
        for handle in plan.decode_handles:
            self.num_computed[handle] += 1
        for handle, num_new in zip(plan.chunk_handles, plan.chunk_num_tokens, strict=True):
            self.num_computed[handle] += num_new


def make_request(number: int, num_prompt: int, max_tokens: int) -> NewRequest:
    """A request whose prompt has nothing in common with others."""
    prompt = tuple(number * 7919 + position & 0xFFFF for position in range(num_prompt))
    return NewRequest(
        RequestId(f"r{number}"),
        prompt,
        SamplingParams(seed=number),
        max_tokens,
        eos_token_ids=frozenset({EOS}),
    )


def measure_steps(num_running: int, num_waiting: int, num_steps: int) -> list[float]:
    """Seconds of each of `num_steps` pure decode steps."""
    max_tokens = WARM_UP_STEPS + num_steps + 2 * BLOCK_SIZE
    budget = 1 << 14
    config = SchedulerConfig(
        max_num_seqs=num_running,
        max_num_batched_tokens=budget,
        max_waiting=num_running + num_waiting,
        target_itl_s=None,
        max_waiting_tokens=(num_running + num_waiting) * (PROMPT_TOKENS + BLOCK_SIZE),
    )
    scheduler = Scheduler(config, b"measured")
    num_blocks = num_running * (2 + (PROMPT_TOKENS + BLOCK_SIZE + max_tokens) // BLOCK_SIZE)
    capacity = ReplicaCapacity(num_blocks, 0, BLOCK_SIZE, budget, num_running)
    scheduler.replica_joined(REPLICA, capacity)
    for number in range(num_running + num_waiting):
        request = make_request(number, PROMPT_TOKENS + number % BLOCK_SIZE, max_tokens)
        scheduler.submit(request, 0.0)
    worker = FakeWorker()
    while scheduler.num_running < num_running:
        _step(scheduler, worker)
    for _ in range(WARM_UP_STEPS):
        _step(scheduler, worker)
    costs_s = [_step(scheduler, worker) for _ in range(num_steps)]
    assert (scheduler.num_running, scheduler.num_waiting) == (num_running, num_waiting)
    return costs_s


def _step(scheduler: Scheduler, worker: FakeWorker) -> float:
    """Plan, and take the result of the plan before; the seconds that both took."""
    started_s = time.thread_time()
    plan, _ = scheduler.schedule(REPLICA, 0.0)
    cost_s = time.thread_time() - started_s
    assert plan is not None
    worker.plans.append(plan)
    if len(worker.plans) == 2:
        result = worker.answer()
        started_s = time.thread_time()
        scheduler.apply_result(REPLICA, result, 0.0)
        cost_s += time.thread_time() - started_s
    return cost_s


def measure_hashing() -> float:
    """Nanoseconds for each token of a prompt, packed into bytes and hashed block by block; the
    least of several runs."""
    hasher = BlockHasher(b"measured")
    token_ids = array("I", range(HASHED_BLOCKS * BLOCK_SIZE))  # as the core keeps them

    def run() -> None:
        packed = token_bytes(token_ids)
        hasher.chain(hasher.root(b""), packed, len(packed) // HASHED_BLOCKS)

    return min(_seconds(run) for _ in range(100)) / len(token_ids) * 1e9


def _seconds(run: Callable[[], None]) -> float:
    started_s = time.thread_time()
    run()
    return time.thread_time() - started_s


def measure_waste() -> float:
    """Part of the blocks' slots that hold no token, over the steps of a run of chat-like requests.

    Lengths follow what is published of ShareGPT conversations (Kwon et al., "Efficient Memory
    Management for Large Language Model Serving with PagedAttention", 2023, figure 11): long-tailed,
    161 prompt tokens and 338 output tokens in the mean.
    """
    rng = Random(1)
    config = SchedulerConfig(max_num_seqs=WASTE_RUNNING, max_waiting=WASTE_REQUESTS)
    scheduler = Scheduler(config, b"measured")
    scheduler.replica_joined(REPLICA, ReplicaCapacity(8192, 0, BLOCK_SIZE, 2048, WASTE_RUNNING))
    for number in range(WASTE_REQUESTS):
        num_prompt, num_output = (
            max(4, min(2048, round(rng.lognormvariate(mean, 1.0)))) for mean in (4.58, 5.32)
        )
        scheduler.submit(make_request(number, num_prompt, num_output), 0.0)
    worker = FakeWorker()
    num_allocated = num_used = 0
    while scheduler.num_running == WASTE_RUNNING or scheduler.num_waiting:
        _step(scheduler, worker)
        worker.count_slots(worker.plans[-1])
        [view] = scheduler.replicas()
        num_allocated += (view.num_blocks - view.num_free_blocks) * BLOCK_SIZE
        num_used += sum(worker.num_computed.values())
    return 1 - num_used / num_allocated


def main(
    running: Annotated[int, typer.Option(min=1, help="sequences that decode")] = 256,
    waiting: Annotated[int, typer.Option(min=0, help="requests that wait")] = 0,
    steps: Annotated[int, typer.Option(min=16, help="steps measured")] = 480,
    out: Annotated[Path | None, typer.Option("--json", help="where the figures go")] = None,
) -> None:
    """Measure a decode step, hashing, and how much of the blocks is used."""
    costs_us = [cost_s * 1e6 for cost_s in measure_steps(running, waiting, steps)]
    figures = {
        "running": running,
        "waiting": waiting,
        "step_us_median": round(statistics.median(costs_us), 1),
        "step_us_p99": round(statistics.quantiles(costs_us, n=100)[-1], 1),
        "step_us_min": round(min(costs_us), 1),
        "hash_ns_per_token": round(measure_hashing(), 2),
        "kv_waste": round(measure_waste(), 4),
    }
    for name, value in figures.items():
        print(f"{name:18} {value}")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
