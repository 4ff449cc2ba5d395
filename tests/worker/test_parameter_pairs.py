"""Every pair of sampling parameters: a row alone equals the same row among 15 others, and a
sequence that comes back whole goes on as before."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from shared.plan import SequenceStart, StepPlan, StepResult
from shared.sampling import SamplingParams, TokenRules
from tests.worker.tiny_llama import make_llama, make_runner, save_safetensors
from worker_svc.model_runner import ModelRunner

PROMPT = [3 + (5 * i) % 40 for i in range(9)]
NUM_OUTPUT = 6
BANNED = (8, 9, 10)
VALUES: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 12},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "typical_p": {"typical_p": 0.7},
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": -2.0},
    "bias": {"bias_token_ids": (5, 50), "biases": (4.0, -30.0)},
    "allowed": {"allowed_token_ids": tuple(range(2, 90))},
    "banned": {"banned_token_ids": BANNED},
    "bad words": {"bad_words": ((20,), (21, 22), (3, 8))},
    "min_tokens": {"min_tokens": 4, "end_token_ids": (2, 60)},
    "logprobs": {"num_logprobs": 2},
}
RULE_NAMES = frozenset(TokenRules.__dataclass_fields__)


def params_of(names: tuple[str, ...], seed: int) -> SamplingParams:
    values = {key: value for name in names for key, value in VALUES[name].items()}
    rules = {key: value for key, value in values.items() if key in RULE_NAMES}
    drawn = {key: value for key, value in values.items() if key not in RULE_NAMES}
    return SamplingParams(seed=seed, rules=TokenRules(**rules), **drawn)  # type: ignore[arg-type]


PAIRS = list(combinations(VALUES, 2))
PARAMS = [params_of(pair, seed) for seed, pair in enumerate(PAIRS)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_safetensors(make_llama(), tmp_path_factory.mktemp("llama"))


def starting(runner: ModelRunner, starts: list[SequenceStart]) -> StepPlan:
    return StepPlan(
        step=runner.state.step + 1,
        base_step=runner.state.step,
        reset=True,
        starts=starts,
        chunk_handles=[start.handle for start in starts],
        chunk_num_tokens=[len(start.token_ids) for start in starts],
        chunk_samples=[True] * len(starts),
    )


def decoding(runner: ModelRunner, handles: list[int]) -> StepPlan:
    step = runner.state.step
    return StepPlan(step=step + 1, base_step=step, decode_handles=handles)


def generate(
    runner: ModelRunner, starts: list[SequenceStart], num_output: int = NUM_OUTPUT
) -> list[StepResult]:
    handles = [start.handle for start in starts]
    results = [runner.execute(starting(runner, starts))]
    results += [runner.execute(decoding(runner, handles)) for _ in range(num_output - 1)]
    assert all(list(result.handles) == handles and not result.failures for result in results)
    return results


def test_all_pairs_are_there() -> None:
    assert len(PAIRS) == len(VALUES) * (len(VALUES) - 1) // 2 == 105


def test_each_pair_is_the_same_alone_among_others_and_after_a_return(path: Path) -> None:
    runner, size = make_runner(path), 15
    for first in range(0, len(PARAMS), size):
        starts = [
            SequenceStart(i, PROMPT, len(PROMPT), 0, range(4 * i, 4 * i + 4), params)
            for i, params in enumerate(PARAMS[first : first + size])
        ]
        together = generate(runner, starts)
        outputs = {
            start.handle: [result.token_ids[start.handle] for result in together]
            for start in starts
        }
        told = [result.logprobs.by_handle() for result in together]
        for start in (starts[0], starts[7], starts[14]):
            alone = generate(runner, [start])
            assert [result.token_ids[0] for result in alone] == outputs[start.handle]
            for mine, all_told in zip(alone, told, strict=True):
                assert mine.logprobs.by_handle().get(start.handle) == all_told.get(start.handle)
        back = [replace(start, token_ids=[*PROMPT, *outputs[start.handle][:3]]) for start in starts]
        rest = generate(runner, back, NUM_OUTPUT - 3)
        for start in starts:
            again = [result.token_ids[start.handle] for result in rest]
            assert again == outputs[start.handle][3:], PAIRS[first + start.handle]
            check(PAIRS[first + start.handle], outputs[start.handle])


def check(names: tuple[str, ...], output: list[int]) -> None:
    """What a parameter forbids has not come."""
    text = " ".join(map(str, [*PROMPT[-1:], *output]))
    if "banned" in names:
        assert not set(output) & set(BANNED)
    if "allowed" in names:
        assert all(2 <= token < 90 for token in output)
    if "bad words" in names:
        assert 20 not in output and "21 22" not in text
    if "min_tokens" in names:
        assert not {2, 60} & set(output[:4])
