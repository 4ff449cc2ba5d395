"""A masked row draws of its mask alone, the others as if there were none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels import reference_logits
from shared.errors import ProtocolError
from shared.plan import SequenceStart, StepPlan, TokenMask
from shared.sampling import SamplingParams, TokenRules
from tests.worker.tiny_llama import make_llama, make_runner, save_safetensors
from worker_svc.model_runner import ModelRunner
from worker_svc.token_masks import apply_masks

PROMPT = tuple(range(3, 23))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_safetensors(make_llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def runner(path: Path) -> ModelRunner:
    return make_runner(path)


def as_bits(token_ids: Sequence[int], vocab_size: int) -> TokenMask:
    allowed = np.zeros(vocab_size, np.uint8)
    allowed[list(token_ids)] = 1
    return TokenMask(bits=np.packbits(allowed, bitorder="little").tobytes())


def prefill(samplings: Sequence[SamplingParams]) -> StepPlan:
    """One prompt in as many sequences."""
    handles = range(len(samplings))
    return StepPlan(
        step=1,
        base_step=0,
        starts=[
            SequenceStart(handle, PROMPT, len(PROMPT), 0, [3 * handle + i for i in range(3)], how)
            for handle, how in zip(handles, samplings, strict=True)
        ],
        chunk_handles=list(handles),
        chunk_num_tokens=[len(PROMPT)] * len(samplings),
        chunk_samples=[True] * len(samplings),
    )


GREEDY, DRAWN = SamplingParams(temperature=0.0), SamplingParams(temperature=5.0, seed=7)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_both_forms_give_a_token_of_the_mask_and_leave_others_alone(
    path: Path, sampling: SamplingParams
) -> None:
    plan = prefill([sampling] * 3)
    free = make_runner(path).execute(plan).token_ids
    runner = make_runner(path)
    vocab_size = runner.state.vocab_size
    allowed = [token for token in range(1, vocab_size, 5) if token != free[0]]
    masks = [TokenMask(token_ids=allowed), as_bits(allowed, vocab_size)]
    result = runner.execute(replace(plan, masked_handles=[0, 2], masks=masks))
    assert list(result.handles) == [0, 1, 2]
    assert result.token_ids[1] == free[1]
    assert result.token_ids[0] == result.token_ids[2] in allowed


def test_filters_rank_what_the_mask_leaves(runner: ModelRunner) -> None:
    """top_k = 2 of three allowed tokens never gives the least of them."""
    tokens: set[int] = set()
    for seed in range(12):
        how = SamplingParams(temperature=50.0, top_k=2, seed=seed)
        mask = TokenMask(token_ids=[5, 9, 12])
        plan = replace(prefill([how]), reset=True, masked_handles=[0], masks=[mask])
        tokens.update(runner.execute(plan).token_ids)
    assert len(tokens) == 2 and tokens < {5, 9, 12}


def test_rules_come_before_the_mask_and_log_probabilities_before_both(runner: ModelRunner) -> None:
    """A bias lifts a token of the mask, and none out of it; what is told is the model's own."""
    told = SamplingParams(temperature=0.0, num_logprobs=3)
    free = runner.execute(prefill([told]))
    rules = TokenRules(bias_token_ids=[9, 7], biases=[60.0, 100.0], banned_token_ids=[12])
    plan = prefill([replace(told, rules=rules)])
    mask = TokenMask(token_ids=[5, 9, 12])
    result = runner.execute(replace(plan, reset=True, masked_handles=[0], masks=[mask]))
    assert list(result.token_ids) == [9]
    assert len(result.logprobs.top_token_ids) == 3
    assert result.logprobs.top_token_ids == free.logprobs.top_token_ids
    assert result.logprobs.top_log_probs == free.logprobs.top_log_probs


def test_rules_that_leave_nothing_of_the_mask_fail_the_row_alone(runner: ModelRunner) -> None:
    banned = replace(GREEDY, rules=TokenRules(banned_token_ids=[5, 9]))
    mask = TokenMask(token_ids=[5, 9])
    result = runner.execute(replace(prefill([banned, GREEDY]), masked_handles=[0], masks=[mask]))
    assert list(result.handles) == [1]
    [failure] = result.failures
    assert failure.handle == 0
    assert "no token" in failure.message, "it is told from a defect of the model"


def test_a_row_with_nothing_left_fails_alone(runner: ModelRunner) -> None:
    nothing = TokenMask(bits=bytes(-(-runner.state.vocab_size // 8)))
    plan = replace(prefill([GREEDY] * 2), masked_handles=[1], masks=[nothing])
    result = runner.execute(plan)
    assert list(result.handles) == [0]
    assert [failure.handle for failure in result.failures] == [1]


def test_what_is_no_number_counts_only_where_it_may_be_drawn() -> None:
    logits = torch.tensor([[1.0, torch.nan, 3.0, 2.0]] * 2)
    plan = StepPlan(
        step=1,
        base_step=0,
        masked_handles=[4, 6, 5],
        masks=[TokenMask(token_ids=[0, 3]), TokenMask(token_ids=[0]), TokenMask(bits=b"\x0b")],
    )
    apply_masks(logits, np.array([4, 5]), plan, reference_logits)  # 6 failed earlier
    low = -torch.inf
    assert torch.equal(logits[0], torch.tensor([1.0, low, low, 2.0]))
    assert logits[1].isnan().tolist() == [False, True, False, False] and logits[1, 2] == low


@pytest.mark.parametrize(
    ("handle", "mask"),
    [
        (1, TokenMask(token_ids=[1])),
        (2, TokenMask(token_ids=[1])),
        (0, TokenMask(bits=b"\xff")),
        (0, TokenMask(token_ids=[1, 1 << 20])),
    ],
    ids=["not sampling", "unknown", "of another vocabulary", "beyond the vocabulary"],
)
def test_a_mask_that_does_not_fit_is_refused(
    runner: ModelRunner, handle: int, mask: TokenMask
) -> None:
    plan = replace(prefill([GREEDY] * 2), chunk_samples=[True, False])
    plan = replace(plan, chunk_num_tokens=[len(PROMPT), 4])
    with pytest.raises(ProtocolError, match="mask"):
        runner.execute(replace(plan, masked_handles=[handle], masks=[mask]))
