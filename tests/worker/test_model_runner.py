"""Steps as the scheduler plans them: the same tokens whatever happens in between."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from kernels.interface import block_of
from shared.errors import ProtocolError
from shared.plan import CacheOp, CacheOpKind, SequenceStart, StepPlan
from shared.sampling import SamplingParams
from tests.worker.tiny_llama import make_llama, make_runner, save_safetensors
from worker_svc.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=99)
PROMPT = list(range(3, 23))  # 20 tokens, 3 blocks of 8
NUM_OUTPUT = 8


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return make_llama()


@pytest.fixture(scope="module")
def path(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_safetensors(model, tmp_path_factory.mktemp("llama"))


@pytest.fixture
def runner(path: Path) -> ModelRunner:
    return make_runner(path)


@pytest.fixture(scope="module")
def expected(model: LlamaForCausalLM) -> list[int]:
    """What transformers generates greedily."""
    tokens = list(PROMPT)
    for _ in range(NUM_OUTPUT):
        with torch.inference_mode():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def start(
    handle: int,
    tokens: Sequence[int] = PROMPT,
    *,
    table: Sequence[int] = (0, 1, 2, 3),
    computed: int = 0,
    prompt: int | None = None,
    sampling: SamplingParams = GREEDY,
) -> SequenceStart:
    return SequenceStart(handle, tokens, prompt or len(tokens), computed, table, sampling)


def prefill(step: int, starts: Sequence[SequenceStart], base: int | None = None) -> StepPlan:
    return StepPlan(
        step=step,
        base_step=step - 1 if base is None else base,
        starts=starts,
        chunk_handles=[s.handle for s in starts],
        chunk_num_tokens=[len(s.token_ids) - s.num_computed_tokens for s in starts],
        chunk_samples=[True] * len(starts),
    )


def decode(runner: ModelRunner, handle: int, count: int) -> list[int]:
    """`count` decode steps of one sequence."""
    tokens: list[int] = []
    for _ in range(count):
        step = runner.state.step + 1
        result = runner.execute(StepPlan(step=step, base_step=step - 1, decode_handles=[handle]))
        assert result.handles == [handle]
        tokens.extend(result.token_ids)
    return tokens


def generate(runner: ModelRunner, first: SequenceStart) -> list[int]:
    """NUM_OUTPUT tokens of one sequence alone."""
    result = runner.execute(prefill(runner.state.step + 1, [first]))
    return [*result.token_ids, *decode(runner, first.handle, NUM_OUTPUT - 1)]


def test_greedy_tokens_equal_transformers(runner: ModelRunner, expected: list[int]) -> None:
    assert generate(runner, start(0)) == expected


def test_a_prompt_in_chunks_gives_the_same_tokens(runner: ModelRunner, expected: list[int]) -> None:
    result = None
    for step, count in enumerate((1, 7, 8, 4), start=1):
        plan = StepPlan(
            step=step,
            base_step=step - 1,
            starts=[start(0)] if step == 1 else (),
            chunk_handles=[0],
            chunk_num_tokens=[count],
            chunk_samples=[count == 4],
        )
        result = runner.execute(plan)
        assert len(result.token_ids) == (count == 4)
    assert result is not None
    assert [*result.token_ids, *decode(runner, 0, NUM_OUTPUT - 1)] == expected


def test_blocks_are_appended_at_block_boundaries(runner: ModelRunner, expected: list[int]) -> None:
    """The 20 tokens of the prompt fill 3 blocks up to position 23; the 4th comes with step 5."""
    tokens = [*runner.execute(prefill(1, [start(0, table=[5, 9, 2])])).token_ids]
    tokens += decode(runner, 0, 4)
    plan = StepPlan(step=6, base_step=5, append_handles=[0], append_blocks=[7], decode_handles=[0])
    tokens += runner.execute(plan).token_ids
    assert [*tokens, *decode(runner, 0, 2)] == expected


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_neighbours_do_not_change_a_sequence(path: Path, sampling: SamplingParams) -> None:
    """FIELD-FAILURES 4: a seeded request changes with its neighbours."""
    alone = generate(make_runner(path), start(0, sampling=sampling))
    runner = make_runner(path)
    generator = np.random.default_rng(1)
    others = [
        start(h, generator.integers(3, 96, 5 + h).tolist(), table=range(4 * h, 4 * h + 4))
        for h in range(1, 9)
    ]
    mine = start(0, sampling=sampling)
    results = [runner.execute(prefill(1, [*others[:4], mine, *others[4:]]))]
    for step in range(2, NUM_OUTPUT + 1):
        plan = StepPlan(step=step, base_step=step - 1, decode_handles=[8, 3, 0, 1, 2, 4, 5, 6, 7])
        results.append(runner.execute(plan))
    together = [result.token_ids[result.handles.index(0)] for result in results]
    assert together == alone


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_a_sequence_comes_back_whole_with_the_same_tokens(
    path: Path, sampling: SamplingParams
) -> None:
    """FIELD-FAILURES 4: after preemption or on another replica; prompt and output recomputed."""
    undisturbed = generate(make_runner(path), start(0, sampling=sampling))
    again = [*PROMPT, *undisturbed[:3]]
    runner = make_runner(path)
    first = start(2, again, table=[9, 8, 7, 6], prompt=len(PROMPT), sampling=sampling)
    resumed = [*runner.execute(prefill(1, [first])).token_ids]
    resumed += decode(runner, 2, NUM_OUTPUT - 4)
    assert resumed == undisturbed[3:]


def test_swapped_out_and_in_again_goes_on(runner: ModelRunner, expected: list[int]) -> None:
    tokens = [*runner.execute(prefill(1, [start(0)])).token_ids, *decode(runner, 0, 2)]
    out = CacheOp(1, CacheOpKind.SWAP_OUT, [0, 1, 2], [4, 3, 5])
    runner.execute(StepPlan(step=4, base_step=3, finished_handles=[0], cache_ops=[out]))
    generate(runner, start(1, [5] * 20))  # another takes the device blocks
    back = CacheOp(2, CacheOpKind.SWAP_IN, [4, 3, 5], [20, 21, 22])
    resumed = start(0, [*PROMPT, *tokens], table=[20, 21, 22], computed=22, prompt=len(PROMPT))
    step = runner.state.step + 1
    plan = StepPlan(
        step=step, base_step=step - 1, starts=[resumed], cache_ops=[back], decode_handles=[0]
    )
    tokens += runner.execute(plan).token_ids
    tokens += decode(runner, 0, 1)
    assert tokens == expected[:5]


def test_a_fork_copies_its_partly_filled_block(runner: ModelRunner, expected: list[int]) -> None:
    """FIELD-FAILURES 1: fork with a partly filled last block."""
    runner.execute(prefill(1, [start(0)]))
    other = next(token for token in range(3, 96) if token != expected[0])
    fork = start(1, [*PROMPT, other], table=[0, 1, 30, 31], computed=20, prompt=20)
    copy = CacheOp(1, CacheOpKind.COPY, [2], [30])
    plan = StepPlan(step=2, base_step=1, starts=[fork], cache_ops=[copy], decode_handles=[0, 1])
    both = runner.execute(plan)
    assert both.token_ids[0] == expected[1]
    # The fork wrote position 20 of its own block; the first sequence reads its own.
    assert decode(runner, 0, 3) == expected[2:5]


def test_the_next_plan_may_follow_before_its_result_is_known(
    runner: ModelRunner, expected: list[int]
) -> None:
    """Run-ahead: decode plans carry no token; the worker feeds its own."""
    plans = [prefill(1, [start(0)])]
    plans += [StepPlan(step=s, base_step=s - 1, decode_handles=[0]) for s in range(2, 9)]
    assert [runner.execute(plan).token_ids[0] for plan in plans] == expected


def test_handles_are_reused_after_they_finish(runner: ModelRunner, expected: list[int]) -> None:
    runner.execute(prefill(1, [start(0, [7, 8, 9])]))
    plan = prefill(2, [start(0)])
    result = runner.execute(
        StepPlan(
            step=2,
            base_step=1,
            finished_handles=[0],
            starts=plan.starts,
            chunk_handles=[0],
            chunk_num_tokens=[20],
            chunk_samples=[True],
        )
    )
    assert [*result.token_ids, *decode(runner, 0, NUM_OUTPUT - 1)] == expected


def test_more_handles_than_rows_at_first(path: Path, expected: list[int]) -> None:
    runner = make_runner(path)
    assert generate(runner, start(700)) == expected


def test_a_plan_that_skips_a_step_does_not_fit_and_a_reset_always_does(
    runner: ModelRunner, expected: list[int]
) -> None:
    runner.execute(prefill(1, [start(0, [7, 8])]))
    assert runner.fits(StepPlan(step=2, base_step=1))
    assert not runner.fits(StepPlan(step=3, base_step=2))
    reset = StepPlan(
        step=9,
        base_step=1,
        reset=True,
        starts=[start(0)],
        chunk_handles=[0],
        chunk_num_tokens=[20],
        chunk_samples=[True],
    )
    assert runner.fits(reset)
    tokens = runner.execute(reset).token_ids
    assert runner.state.step == 9
    assert [*tokens, *decode(runner, 0, NUM_OUTPUT - 1)] == expected


def test_unsound_logits_fail_one_sequence_and_spare_the_others(
    runner: ModelRunner, expected: list[int]
) -> None:
    """FIELD-FAILURES 1: an error in one sequence's step is lost when others decode in it."""
    runner.execute(prefill(1, [start(0), start(1, [5, 6], table=[40])]))
    block_of(runner.cache.device_blocks, 40)[:] = float("nan")  # what sequence 1 has computed
    result = runner.execute(StepPlan(step=2, base_step=1, decode_handles=[1, 0]))
    assert (result.handles, result.token_ids) == ([0], expected[1:2])
    assert [(f.handle, f.message) for f in result.failures] == [(1, "its logits are not finite")]
    # A plan that was on its way still names it: it fails again, and nothing else.
    result = runner.execute(StepPlan(step=3, base_step=2, decode_handles=[0, 1]))
    assert (result.handles, result.token_ids) == ([0], expected[2:3])
    assert [failure.handle for failure in result.failures] == [1]
    # Its handle and its block serve others afterwards.
    plan = prefill(4, [start(1, table=[40, 41, 42, 43])])
    runner.execute(StepPlan(step=4, base_step=3, finished_handles=[1], starts=plan.starts))
    plan = StepPlan(
        step=5, base_step=4, chunk_handles=[1], chunk_num_tokens=[20], chunk_samples=[True]
    )
    assert [*runner.execute(plan).token_ids, *decode(runner, 1, 7)] == expected


COPY, OUT = CacheOpKind.COPY, CacheOpKind.SWAP_OUT
BAD_PLANS = {
    "unknown decode": StepPlan(step=2, base_step=1, decode_handles=[3]),
    "unknown finish": StepPlan(step=2, base_step=1, finished_handles=[9999]),
    "finished twice": StepPlan(step=2, base_step=1, finished_handles=[0, 0]),
    "started twice": prefill(2, [start(0)]),
    "handle beyond the limit": prefill(2, [start(1 << 20)]),
    "token beyond the vocabulary": prefill(2, [start(1, [96])]),
    "prompt beyond the context": prefill(2, [start(1, [5] * 129, table=range(16))]),
    "table beyond the context": prefill(2, [start(1, table=range(17))]),
    "block beyond the pool": prefill(2, [start(1, table=[64])]),
    "block missing": prefill(2, [start(1, table=[0, 1])]),
    "appended beyond the pool": StepPlan(
        step=2, base_step=1, append_handles=[0], append_blocks=[64]
    ),
    "computed twice": StepPlan(step=2, base_step=1, decode_handles=[0, 0]),
    "more tokens than there are": StepPlan(
        step=2, base_step=1, chunk_handles=[0], chunk_num_tokens=[2], chunk_samples=[False]
    ),
    "samples before its last token": StepPlan(
        step=2,
        base_step=1,
        starts=[start(1)],
        chunk_handles=[1],
        chunk_num_tokens=[3],
        chunk_samples=[True],
    ),
    "too many sequences": StepPlan(step=2, base_step=1, decode_handles=range(17)),
    "too many tokens": StepPlan(
        step=2, base_step=1, chunk_handles=[0], chunk_num_tokens=[257], chunk_samples=[False]
    ),
    "host block missing": StepPlan(step=2, base_step=1, cache_ops=[CacheOp(1, OUT, [0], [8])]),
    "one target twice": StepPlan(step=2, base_step=1, cache_ops=[CacheOp(1, COPY, [0, 1], [5, 5])]),
    "copied onto a source": StepPlan(
        step=2, base_step=1, cache_ops=[CacheOp(1, COPY, [0, 1], [1, 2])]
    ),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_a_plan_that_the_state_contradicts_is_an_error(runner: ModelRunner, name: str) -> None:
    runner.execute(prefill(1, [start(0)]))
    with pytest.raises(ProtocolError):
        runner.execute(BAD_PLANS[name])
