"""A fault in a prompt's first chunk, of which nothing is sampled, with the real scheduler core and
the real worker: the request fails, and the same prompt is computed again, rightly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import (
    Event,
    NewRequest,
    ReplicaCapacity,
    RequestFailed,
    RequestStarted,
    TokensStep,
)
from scheduler_svc.core.scheduler import Scheduler
from shared.ids import ReplicaId, RequestId
from shared.sampling import SamplingParams
from tests.worker.tiny_llama import BLOCK_SIZE, make_llama, make_runner, save_safetensors
from worker_svc.model_runner import ModelRunner

REPLICA = ReplicaId(1)
PROMPT = list(range(3, 3 + 2 * BLOCK_SIZE + 4))
NUM_OUTPUT = 6
NUM_BLOCKS = 64


class Served:
    """The core and one worker, a step at a time."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._scheduler = Scheduler(SchedulerConfig(vocab_size=96), b"key")
        capacity = ReplicaCapacity(NUM_BLOCKS, 0, BLOCK_SIZE, BLOCK_SIZE, 4, 1)
        self._scheduler.replica_joined(REPLICA, capacity)

    def submit(self, name: str) -> None:
        sampling = SamplingParams(temperature=0.0)
        self._scheduler.submit(NewRequest(RequestId(name), PROMPT, sampling, NUM_OUTPUT), 0.0)

    def step(self) -> list[Event] | None:
        """What a step gives; None when there is nothing to do."""
        plan, events = self._scheduler.schedule(REPLICA, 0.0)
        if plan is None:
            return None
        events += self._scheduler.apply_result(REPLICA, self._runner.execute(plan), 0.0)
        self._scheduler.check_invariants()
        return events

    def run(self) -> list[Event]:
        events: list[Event] = []
        while (more := self.step()) is not None:
            events += more
        return events


@pytest.mark.parametrize("is_spoiled", [True, False])
def test_a_prompt_whose_first_chunk_was_spoiled_is_computed_again(
    tmp_path: Path, is_spoiled: bool
) -> None:
    model = make_llama()
    expected = list(PROMPT)
    for _ in range(NUM_OUTPUT):
        with torch.inference_mode():
            expected.append(int(model(torch.tensor([expected])).logits[0, -1].argmax()))
    runner = make_runner(save_safetensors(model, tmp_path), num_blocks=NUM_BLOCKS)
    served = Served(runner)
    served.submit("first")
    served.step()
    if is_spoiled:
        runner.cache.device_blocks[:] = float("nan")
    events = served.run()
    assert any(isinstance(event, RequestFailed) for event in events) == is_spoiled
    served.submit("second")
    events = served.run()
    assert not any(isinstance(event, RequestFailed) for event in events)
    [started] = [event for event in events if isinstance(event, RequestStarted)]
    assert started.num_cached_tokens == (0 if is_spoiled else 2 * BLOCK_SIZE)
    tokens = [t for event in events if isinstance(event, TokensStep) for t in event.token_ids]
    assert tokens == expected[len(PROMPT) :]
