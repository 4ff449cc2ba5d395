"""A worker whose logits Triton handles gives the tokens that the CPU's kernels give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import triton as kernels
from kernels.logits import LogitKernels
from kernels.triton import logit_rules, sampling
from shared.plan import SequenceStart, StepPlan, StepResult, TokenMask
from shared.sampling import SamplingParams, TokenRules
from tests.worker.tiny_llama import CPU, make_llama, make_runner, save_safetensors
from worker_svc.warm_up import warm_up

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton takes the CPU's tensors in its interpreter alone"
)

RULES = TokenRules(
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    bias_token_ids=(5, 40),
    biases=(4.0, 3.0),
    allowed_token_ids=tuple(range(2, 90)),
    banned_token_ids=(6,),
    bad_words=((7,), (5, 5)),
    min_tokens=3,
    end_token_ids=(2,),
)
SAMPLINGS = (
    SamplingParams(temperature=0.0, rules=RULES),
    SamplingParams(temperature=1.5, seed=3, num_logprobs=2),
    SamplingParams(temperature=2.0, top_k=40, top_p=0.9, min_p=0.01, seed=4, rules=RULES),
    SamplingParams(temperature=3.0, typical_p=0.8, seed=5),
)
PROMPT = tuple(range(3, 23))
NUM_STEPS = 5


def run(path: Path, logit_kernels: LogitKernels | None) -> list[StepResult]:
    runner = make_runner(path, logit_kernels=logit_kernels)
    handles = range(len(SAMPLINGS))
    results = []
    for step in range(1, NUM_STEPS + 1):
        masks = [TokenMask(token_ids=range(step, 96, 3)), TokenMask(bits=bytes([0x5A] * 12))]
        plan = StepPlan(
            step=step,
            base_step=step - 1,
            starts=starts() if step == 1 else (),
            decode_handles=handles if step > 1 else (),
            chunk_handles=handles if step == 1 else (),
            chunk_num_tokens=[len(PROMPT)] * len(handles) if step == 1 else (),
            chunk_samples=[True] * len(handles) if step == 1 else (),
            masked_handles=[0, 3],
            masks=masks,
        )
        results.append(runner.execute(plan))
    return results


def starts() -> Sequence[SequenceStart]:
    return [
        SequenceStart(handle, PROMPT, len(PROMPT), 0, [4 * handle + i for i in range(4)], how)
        for handle, how in enumerate(SAMPLINGS)
    ]


def test_steps_with_every_rule_mask_and_filter_give_the_same(tmp_path: Path) -> None:
    path = save_safetensors(make_llama(), tmp_path)
    for computed, expected in zip(run(path, kernels), run(path, None), strict=True):
        assert computed.handles == expected.handles == [0, 1, 2, 3]
        assert computed.token_ids == expected.token_ids
        assert computed.logprobs == expected.logprobs


class NotedKernel:
    """A kernel that notes its launches, and whether what it is over is aligned."""

    def __init__(self, name: str, kernel: Any, launched: list[tuple[str, bool]]) -> None:
        self._name, self._kernel, self._launched = name, kernel, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(first: torch.Tensor, *others: Any, **options: Any) -> None:
            self._launched.append((self._name, first.data_ptr() % 16 == 0))
            self._kernel[grid](first, *others, **options)

        return launch


def test_a_start_launches_every_kernel_over_logits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or else the first request that needs a kernel waits for its compiler, which makes another one
    for rows that are not aligned: greedy ones, behind others."""
    launched: list[tuple[str, bool]] = []
    for module in (sampling, logit_rules):
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel"):
                monkeypatch.setattr(module, name, NotedKernel(name, kernel, launched))
    warm_up(kernels, 130, CPU)
    rules = ["rule_kernel"] * 3
    draws = ["best_kernel", "draw_kernel", "gather_kernel", "draw_candidates_kernel"]
    aligned = [(name, True) for name in (*rules, "mask_kernel", *draws)]
    assert launched == [*aligned, ("best_kernel", False)]
