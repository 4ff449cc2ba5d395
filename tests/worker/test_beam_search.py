"""Beam search against transformers' own: the algorithm on its logits, and the whole way from the
scheduler's core to a worker's steps."""

from __future__ import annotations

import itertools
from collections import deque
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM

from scheduler_svc.core.beam import BeamSearch, num_candidates
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import (
    NewRequest,
    ReplicaCapacity,
    SequenceFinished,
    TokensAppended,
)
from scheduler_svc.core.scheduler import Scheduler
from shared.codec import decode_plan, decode_result, encode_plan, encode_result
from shared.ids import ReplicaId, RequestId
from shared.plan import StepPlan
from shared.sampling import BeamParams, EarlyStopping, SamplingParams
from tests.worker.tiny_llama import BLOCK_SIZE, make_llama, make_runner, save_safetensors
from worker_svc.candidates import top_candidates

VOCAB_SIZE = 24
PROMPT = [5, 9, 2, 11]
IN_TRANSFORMERS = {
    EarlyStopping.HEURISTIC: False,
    EarlyStopping.WHEN_FULL: True,
    EarlyStopping.NEVER: "never",
}
CASES = [
    *itertools.product((2, 4), (-1.5, 1.0), EarlyStopping, ((), (3, 7, 8)), (9,)),
    (3, 0.0, EarlyStopping.NEVER, (3,), 9),
    (4, 1.0, EarlyStopping.HEURISTIC, (3,), 1),
]
R1 = ReplicaId(1)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return make_llama(vocab_size=VOCAB_SIZE, eos_token_id=None)


@torch.inference_mode()
def of_transformers(
    model: LlamaForCausalLM,
    params: BeamParams,
    end_ids: tuple[int, ...],
    max_tokens: int,
    prompt: list[int],
) -> list[tuple[list[int], float]]:
    """The hypotheses' tokens, the one that ends them included, and scores."""
    output = model.generate(
        torch.tensor([prompt]),
        GenerationConfig(
            num_beams=params.width,
            num_return_sequences=params.width,
            length_penalty=params.length_penalty,
            early_stopping=IN_TRANSFORMERS[params.early_stopping],
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=list(end_ids) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        ),
    )
    found = []
    for row, score in zip(output.sequences.tolist(), output.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        length = next((at + 1 for at, token in enumerate(tokens) if token in end_ids), len(tokens))
        found.append((tokens[:length], score))
    return found


@torch.inference_mode()
def of_quire(
    model: LlamaForCausalLM, params: BeamParams, end_ids: tuple[int, ...], max_tokens: int
) -> list[tuple[list[int], float]]:
    search = BeamSearch(params, frozenset(end_ids), max_tokens)
    count = num_candidates(params.width, len(end_ids))
    beams = [list(PROMPT)]
    while beams:
        logits = model(torch.tensor(beams)).logits[:, -1]
        found = top_candidates(logits, range(len(beams)), [count] * len(beams))
        chosen = search.advance([(one.token_ids, one.log_probs) for one in found])
        beams = [[*beams[parent], token] for parent, token in chosen]
    return [
        (one.token_ids + ([] if one.end_token_id is None else [one.end_token_id]), one.score)
        for one in search.hypotheses
    ]


def test_the_result_is_that_of_transformers(model: LlamaForCausalLM) -> None:
    for width, penalty, early_stopping, end_ids, max_tokens in CASES:
        params = BeamParams(width, penalty, early_stopping)
        ours = of_quire(model, params, end_ids, max_tokens)
        theirs = of_transformers(model, params, end_ids, max_tokens, PROMPT)
        case = (width, penalty, early_stopping, end_ids, max_tokens)
        assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs], case
        for (_, score), (_, expected) in zip(ours, theirs, strict=True):
            assert score == pytest.approx(expected, rel=1e-4, abs=1e-4), case


def _request(name: str, prompt: list[int], params: BeamParams | None) -> NewRequest:
    return NewRequest(
        RequestId(name),
        tuple(prompt),
        SamplingParams(temperature=0.0),
        max_tokens=14,
        eos_token_ids=frozenset({3}),
        num_sequences=params.num_return if params else 1,
        beam=params,
    )


@pytest.mark.parametrize("num_blocks", [64, 14])
def test_the_engine_comes_to_the_same(
    model: LlamaForCausalLM, tmp_path: Path, num_blocks: int
) -> None:
    """Two searches and two greedy sequences side by side, over the wire's messages; in the small
    pool they preempt each other."""
    runner = make_runner(save_safetensors(model, tmp_path), num_blocks=num_blocks)
    scheduler = Scheduler(SchedulerConfig(max_num_batched_tokens=16), b"key")
    capacity = ReplicaCapacity(num_blocks, 0, BLOCK_SIZE, 16, 16)
    scheduler.replica_joined(R1, capacity)
    params = BeamParams(4, num_return=4)
    prompts = {"a": PROMPT, "b": [2, 4, *range(8, 24), 6]}
    for name, prompt in prompts.items():
        scheduler.submit(_request(name, prompt, params), 0.0)
        scheduler.submit(_request(f"greedy {name}", prompt, None), 0.0)
    tokens: dict[str, list[list[int]]] = {name: [[] for _ in range(4)] for name in prompts}
    ends: dict[str, list[SequenceFinished]] = {name: [] for name in prompts}
    in_flight: deque[StepPlan] = deque()
    while scheduler.num_running + scheduler.num_waiting or in_flight:
        while (plan := scheduler.schedule(R1, 0.0)[0]) is not None:
            in_flight.append(decode_plan(encode_plan(plan)))
        result = runner.execute(in_flight.popleft())
        events = scheduler.apply_result(R1, decode_result(encode_result(result)), 0.0)
        scheduler.check_invariants()
        for event in events:
            if isinstance(event, TokensAppended):
                tokens[event.request_id][event.sequence_index] += event.token_ids
            elif isinstance(event, SequenceFinished) and event.request_id in ends:
                ends[event.request_id].append(event)
    assert (scheduler.counters.preemptions > 0) == (num_blocks < 64)
    for name, prompt in prompts.items():
        expected = of_transformers(model, params, (3,), 14, prompt)
        for index, (end, (theirs, score)) in enumerate(zip(ends[name], expected, strict=True)):
            own_end = [] if end.stop_token_id is None else [end.stop_token_id]
            assert tokens[name][index] + own_end == theirs
            assert end.beam_score == pytest.approx(score, rel=1e-4)
            assert end.num_output_tokens == len(theirs)


def test_ties_go_to_the_better_beam_and_then_to_the_lower_token() -> None:
    search = BeamSearch(BeamParams(2), frozenset(), 3)
    assert search.advance([([4, 9, 1], [-1.0, -1.0, -1.0])]) == [(0, 1), (0, 4)]
    equal = ([8, 7], [-1.0, -1.0])
    assert search.advance([equal, equal]) == [(0, 7), (0, 8)]


def test_a_hypothesis_beyond_the_first_ranks_is_no_answer() -> None:
    """Only the first `width` candidates may end; the others are there so that beams go on."""
    search = BeamSearch(BeamParams(2), frozenset({0}), 5)
    assert search.advance([([3, 4, 0, 5], [-1.0, -2.0, -3.0, -4.0])]) == [(0, 3), (0, 4)]
    assert not search.hypotheses
