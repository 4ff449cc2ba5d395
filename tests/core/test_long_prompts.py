"""Long prompts beside running streams, in the time of a made-up machine: what chunks sized for the
target are worth, and what they cost."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from scheduler_svc.core.config import SchedulerConfig
from shared.plan import StepPlan
from tests.core.driver import R1, Driver, make_request

FIXED_S, TOKEN_S, PAIR_S, ROW_S, CONTEXT_S = 3e-3, 4e-4, 5e-8, 8e-4, 5e-8
"""About a small model on two cores: 4,000 prompt tokens take 2 s."""
NUM_STREAMS, NUM_PROMPTS, PROMPT_TOKENS = 8, 2, 4000


@dataclass(slots=True)
class Machine:
    """Runs plans in its own time; keeps how deep each sequence is."""

    depths: dict[int, int]

    def step_s(self, plan: StepPlan) -> float:
        for start in plan.starts:
            self.depths[start.handle] = start.num_computed_tokens
        seconds = FIXED_S
        for handle in plan.decode_handles:
            seconds += ROW_S + CONTEXT_S * self.depths[handle]
            self.depths[handle] += 1
        for handle, num_new in zip(plan.chunk_handles, plan.chunk_num_tokens, strict=True):
            pairs = num_new * (self.depths[handle] + num_new / 2)
            seconds += TOKEN_S * num_new + PAIR_S * pairs
            self.depths[handle] += num_new
        return seconds


def run(target_itl_s: float | None) -> tuple[list[float], float]:
    """Seconds between tokens of all streams while a long prompt waits for its token, in order, and
    the end of all work."""
    driver = Driver(SchedulerConfig(max_num_batched_tokens=8192, target_itl_s=target_itl_s))
    driver.join(num_blocks=2000, max_num_batched_tokens=8192, prefill_tokens_per_s=2000.0)
    machine = Machine({})
    for number in range(NUM_STREAMS):
        driver.submit(make_request(f"stream{number}", 30, 120))
    last_s: dict[str, float] = {}
    gaps_s: list[float] = []
    counts: dict[str, int] = defaultdict(int)
    num_sent = 0
    while (plan := driver.schedule(R1)) is not None:
        step_s = machine.step_s(plan)
        is_beside = num_sent > sum(name.startswith("prompt") for name, _ in driver.ends)
        driver.now += step_s
        driver.apply(replace(driver.work(), execute_s=step_s))
        while num_sent < NUM_PROMPTS and driver.now >= 0.5 + num_sent:
            driver.submit(make_request(f"prompt{num_sent}", PROMPT_TOKENS + num_sent, 1))
            num_sent += 1
        for (name, _), tokens in driver.tokens.items():
            if name.startswith("stream") and len(tokens) > counts[name]:
                if is_beside and counts[name]:
                    gaps_s.append(driver.now - last_s[name])
                counts[name], last_s[name] = len(tokens), driver.now
    assert len(driver.ends) == NUM_STREAMS + NUM_PROMPTS
    return sorted(gaps_s), driver.now


def test_the_slowest_tokens_come_four_times_sooner_and_all_work_ends_as_soon() -> None:
    chunked_s, chunked_end_s = run(0.1)
    whole_s, whole_end_s = run(None)
    p99 = -1 - len(chunked_s) // 100
    assert chunked_s[p99] <= whole_s[-1 - len(whole_s) // 100] / 4
    assert chunked_s[-1] <= 0.12
    assert chunked_end_s <= 1.05 * whole_end_s
