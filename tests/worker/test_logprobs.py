"""Log-probabilities of output and prompt: transformers' own, however the work is cut."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from kernels.decoder import StepLogits
from shared.logprobs import Logprobs
from shared.plan import SequenceStart, StepPlan
from shared.sampling import SamplingParams, TokenRules
from tests.worker.tiny_llama import make_llama, make_runner, save_safetensors
from worker_svc import prompt_logprobs
from worker_svc.logprobs import PlaceLogprobs
from worker_svc.model_runner import ModelRunner

PROMPT = [3 + (7 * i) % 90 for i in range(20)]
VOCAB_SIZE = 96
NUM_OUTPUT = 6
TELLING = SamplingParams(temperature=0.0, num_logprobs=3)
HINDERED = replace(TELLING, rules=TokenRules(repetition_penalty=5.0, banned_token_ids=(5, 6, 7)))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return make_llama()


@pytest.fixture(scope="module")
def path(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_safetensors(model, tmp_path_factory.mktemp("llama"))


@pytest.fixture
def runner(path: Path) -> ModelRunner:
    return make_runner(path)


def expected(model: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities [len(tokens), vocab_size] of what follows each token."""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].double().log_softmax(dim=-1)


def assert_told(told: Logprobs, tokens: list[int], log_probs: torch.Tensor) -> None:
    """`told` is of `tokens`, each by its row of `log_probs`."""
    num_top = told.num_top
    assert len(told.log_probs) == len(told.ranks) == len(tokens) == len(log_probs)
    assert len(told.top_token_ids) == len(told.top_log_probs) == num_top * len(tokens)
    for place, (token, row) in enumerate(zip(tokens, log_probs, strict=True)):
        assert told.log_probs[place] == pytest.approx(float(row[token]), abs=1e-4)
        assert told.ranks[place] == 1 + int((row > row[token]).sum())
        best = row.topk(num_top)
        mine = slice(place * num_top, (place + 1) * num_top)
        assert list(told.top_token_ids[mine]) == best.indices.tolist()
        assert told.top_log_probs[mine] == pytest.approx(best.values.tolist(), abs=1e-4)


def start(handle: int = 0, **changes: object) -> SequenceStart:
    table = range(4 * handle, 4 * handle + 4)
    whole = SequenceStart(handle, PROMPT, len(PROMPT), 0, table, TELLING)
    return replace(whole, **changes)  # type: ignore[arg-type]


def chunk(runner: ModelRunner, sizes: dict[int, int], *starts: SequenceStart) -> StepPlan:
    """A plan in which each handle computes so many tokens."""
    state, step = runner.state, runner.state.step + 1
    left = {one.handle: len(one.token_ids) - one.num_computed_tokens for one in starts}
    for handle in sizes.keys() - left.keys():
        left[handle] = int(state.num_tokens[handle] - state.num_computed[handle])
    return StepPlan(
        step=step,
        base_step=step - 1,
        starts=starts,
        chunk_handles=list(sizes),
        chunk_num_tokens=list(sizes.values()),
        chunk_samples=[sizes[handle] == left[handle] for handle in sizes],
    )


def decode(runner: ModelRunner, *handles: int) -> StepPlan:
    step = runner.state.step + 1
    return StepPlan(step=step, base_step=step - 1, decode_handles=handles)


def joined(parts: list[Logprobs]) -> Logprobs:
    return Logprobs(
        [value for part in parts for value in part.log_probs],
        [value for part in parts for value in part.ranks],
        parts[0].num_top,
        [value for part in parts for value in part.top_token_ids],
        [value for part in parts for value in part.top_log_probs],
    )


@pytest.mark.parametrize("sampling", [TELLING, HINDERED], ids=["plain", "with rules"])
def test_output_is_told_by_the_models_own_logits(
    model: LlamaForCausalLM, runner: ModelRunner, sampling: SamplingParams
) -> None:
    """Whatever rules exclude and change, what is told is of the softmax before them."""
    tokens, told = list(PROMPT), []
    result = runner.execute(chunk(runner, {0: 20}, start(sampling=sampling)))
    for _ in range(NUM_OUTPUT):
        tokens += result.token_ids
        told.append(result.logprobs.by_handle()[0])
        result = runner.execute(decode(runner, 0))
    log_probs = expected(model, tokens)
    assert_told(joined(told), tokens[len(PROMPT) :], log_probs[len(PROMPT) - 1 : -1])
    is_greedy = all(rank == 1 for part in told for rank in part.ranks)
    assert is_greedy == (sampling is TELLING)


@pytest.mark.parametrize("sizes", [[20], [1, 7, 8, 4], [19, 1]])
@pytest.mark.parametrize("places_at_once", [1, 3, 100])
def test_the_prompt_is_told_however_it_is_cut(
    model: LlamaForCausalLM,
    runner: ModelRunner,
    monkeypatch: pytest.MonkeyPatch,
    sizes: list[int],
    places_at_once: int,
) -> None:
    monkeypatch.setattr(prompt_logprobs, "MAX_LOGITS_BYTES", 4 * VOCAB_SIZE * places_at_once)
    told: list[Logprobs] = []
    token_ids: list[int] = []
    for number, size in enumerate(sizes):
        mine = [start(num_prompt_logprobs=5, first_prompt_logprob=1)] if number == 0 else []
        result = runner.execute(chunk(runner, {0: size}, *mine))
        told += result.prompt_logprobs.by_handle().values()
        token_ids += result.token_ids
    log_probs = expected(model, PROMPT)
    assert_told(joined(told), PROMPT[1:], log_probs[:-1])
    assert token_ids == [int(log_probs[-1].argmax())], "the first token is not moved by it"


def test_what_is_told_already_is_not_told_again(
    model: LlamaForCausalLM, runner: ModelRunner
) -> None:
    """A sequence comes back after a loss, with tokens beyond its prompt."""
    tokens = [*PROMPT, 9, 8, 7]
    back = start(token_ids=tokens, num_prompt_logprobs=0, first_prompt_logprob=13)
    first = runner.execute(chunk(runner, {0: 10}, back))
    second = runner.execute(chunk(runner, {0: 13}))
    assert not first.prompt_logprobs.handles
    log_probs = expected(model, tokens)
    assert_told(second.prompt_logprobs.by_handle()[0], PROMPT[13:], log_probs[12:19])
    assert second.token_ids == [int(log_probs[-1].argmax())]


def test_neighbours_change_nothing_that_is_told(path: Path) -> None:
    alone, together = make_runner(path), make_runner(path)
    generator = np.random.default_rng(2)
    others = [
        replace(
            start(handle),
            token_ids=generator.integers(3, 96, 20).tolist(),
            num_prompt_logprobs=handle if handle % 2 else None,
            first_prompt_logprob=handle % 2,
            sampling=replace(TELLING, temperature=1.0, num_logprobs=handle % 3 or None),
        )
        for handle in range(1, 8)
    ]
    mine = start(num_prompt_logprobs=2, first_prompt_logprob=1)
    own = alone.execute(chunk(alone, {0: 20}, mine))
    sizes = {one.handle: 20 for one in (*others[:3], mine, *others[3:])}
    among = together.execute(chunk(together, sizes, *others, mine))
    for kind in ("logprobs", "prompt_logprobs"):
        told = getattr(among, kind).by_handle()
        assert told[0] == getattr(own, kind).by_handle()[0]
        wanting = {1, 3, 5, 7} if kind == "prompt_logprobs" else {1, 2, 4, 5, 7}
        assert told.keys() == {0} | wanting


def test_unsound_logits_fail_their_sequence_alone_and_tell_nothing(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NaN in the logits of a prompt's token, or of the token that is drawn."""
    forward = runner.decoder.forward

    def spoilt(*args: Any) -> StepLogits:
        step = forward(*args)
        logits = step.logits.clone()
        logits[:, 50] = torch.where(logits[:, 50] > spoil_above, torch.nan, logits[:, 50])
        return StepLogits(logits, step.greedy)

    monkeypatch.setattr(runner.decoder, "forward", spoilt)
    spoil_above = -torch.inf
    banned = replace(TELLING, rules=TokenRules(banned_token_ids=(50,)))
    told = start(0, num_prompt_logprobs=1, first_prompt_logprob=1)
    drawn = start(1, sampling=banned)
    result = runner.execute(chunk(runner, {0: 10, 1: 20}, told, drawn))
    assert [failure.handle for failure in result.failures] == [0, 1]
    assert not (result.handles or result.logprobs.handles or result.prompt_logprobs.handles)
    spoil_above = torch.inf
    result = runner.execute(chunk(runner, {0: 10, 2: 20}, start(2)))
    assert [failure.handle for failure in result.failures] == [0]
    assert result.handles == [2]


def test_ranks_and_the_likeliest_break_ties_by_the_lower_id() -> None:
    logits = torch.tensor([[1.0, 3.0, -torch.inf, 3.0, 1.0, 3.0]] * 3)
    places = PlaceLogprobs(num_top=5)
    places.add(logits, [3, 0, 2])
    assert places.ranks == [2, 4, 6]
    assert places.top_token_ids == [1, 3, 5, 0, 4] * 3
    total = math.log(3 * math.exp(3) + 2 * math.exp(1))
    assert places.log_probs == pytest.approx([3 - total, 1 - total, -math.inf])


def test_no_likeliest_tokens_are_told_when_none_are_asked_for() -> None:
    places = PlaceLogprobs(num_top=0)
    places.add(torch.zeros(2, 8), [3, 4])
    assert places.ranks == [4, 5]
    assert places.log_probs == pytest.approx([-math.log(8)] * 2)
    assert places.top_token_ids == places.top_log_probs == []
