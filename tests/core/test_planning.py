"""What a plan holds: decodes first, chunks within the budget, differences alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import TokensStep
from scheduler_svc.core.request import Sequence
from scheduler_svc.core.sequence_table import SequenceTable
from scheduler_svc.core.step_budget import MIN_CHUNK_TOKENS
from shared.plan import StepPlan
from tests.core.driver import R1, Driver, make_request


def test_a_new_sequence_comes_whole_and_then_only_by_handle() -> None:
    driver = Driver()
    driver.join()
    driver.submit(request := make_request("a", 20, max_tokens=14))
    first = driver.schedule()
    assert first is not None
    [start] = first.starts
    assert (start.handle, start.num_computed_tokens, start.num_prompt_tokens) == (0, 0, 20)
    assert tuple(start.token_ids) == request.prompt_token_ids
    assert len(start.block_table) == 2
    assert (first.step, first.base_step, first.reset) == (1, 0, False)
    assert (first.chunk_handles, first.chunk_num_tokens, first.chunk_samples) == ([0], [20], [True])
    second = driver.schedule()
    assert second is not None
    assert (second.step, second.base_step, second.decode_handles) == (2, 1, [0])
    assert not (second.starts or second.append_handles or second.chunk_handles)


def test_no_third_plan_while_two_are_in_flight() -> None:
    driver = Driver()
    driver.join()
    driver.submit(make_request("a", 4))
    assert driver.schedule() is not None
    assert driver.schedule() is not None
    assert driver.schedule() is None
    driver.apply(driver.work())
    assert driver.schedule() is not None


def test_without_run_ahead_a_plan_waits_for_the_result_of_the_last() -> None:
    driver = Driver(SchedulerConfig(run_ahead=False))
    driver.join()
    driver.submit(request := make_request("a", 4))
    assert driver.schedule() is not None
    assert driver.schedule() is None
    driver.apply(driver.work())
    driver.run()
    driver.check_answer(request)


def test_nothing_to_do_gives_no_plan() -> None:
    driver = Driver()
    driver.join()
    assert driver.schedule() is None


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_no_token_is_planned_beyond_max_tokens(max_tokens: int) -> None:
    driver = Driver()
    driver.join()
    driver.submit(request := make_request("a", 4, max_tokens))
    driver.run()
    driver.check_answer(request)
    assert sum(plan.num_tokens for plan in driver.history) == 4 + max_tokens - 1


def test_a_long_prompt_takes_several_steps_and_samples_in_the_last() -> None:
    driver = Driver(SchedulerConfig(max_num_batched_tokens=16))
    driver.join()
    driver.submit(request := make_request("a", 40, max_tokens=2))
    driver.run()
    driver.check_answer(request)
    chunks = [(plan.chunk_num_tokens, plan.chunk_samples) for plan in driver.history[:3]]
    assert chunks == [([16], [False]), ([16], [False]), ([8], [True])]


def test_decodes_come_first_and_share_the_budget_with_chunks() -> None:
    driver = Driver(SchedulerConfig(max_num_batched_tokens=8))
    driver.join()
    driver.submit(make_request("a", 4))
    driver.step()
    driver.submit(make_request("b", 20))
    plan = driver.schedule()
    assert plan is not None
    assert (plan.decode_handles, plan.chunk_handles, plan.chunk_num_tokens) == ([0], [1], [7])
    assert plan.num_tokens <= 8


def test_a_last_chunk_of_one_token_is_a_decode() -> None:
    driver = Driver(SchedulerConfig(max_num_batched_tokens=4))
    driver.join()
    driver.submit(make_request("a", 5))
    driver.step()
    plan = driver.schedule()
    assert plan is not None
    assert (plan.decode_handles, plan.chunk_handles) == ([0], [])


def test_running_prompts_go_before_new_ones() -> None:
    driver = Driver(SchedulerConfig(max_num_batched_tokens=16))
    driver.join()
    driver.submit(make_request("a", 24))
    driver.step()
    driver.submit(make_request("b", 24, priority=5))
    plan = driver.schedule()
    assert plan is not None
    assert (plan.chunk_handles, plan.chunk_num_tokens) == ([0, 1], [8, 8])


def longest_step_s(target_itl_s: float | None) -> float:
    """The longest step in which something decodes, on a machine of 1 ms a token and 10 ms a step,
    while prompts of 300 tokens come to four streams; the first prompt's steps don't count."""

    def machine_s(plan: StepPlan) -> float:
        return 0.01 + 1e-3 * plan.num_tokens

    driver = Driver(SchedulerConfig(target_itl_s=target_itl_s))
    driver.join(num_blocks=400)
    for number in range(4):
        driver.submit(make_request(f"stream{number}", 4, 200))
    longest_s = 0.0
    for number in range(80):
        if number % 20 == 5:
            driver.submit(make_request(f"prompt{number}", 300, 1))
        if (plan := driver.schedule()) is None:
            break
        driver.apply(replace(driver.work(), execute_s=machine_s(plan)))
        if number >= 25 and plan.decode_handles:
            longest_s = max(longest_s, machine_s(plan))
    assert len(driver.started) == 8
    return longest_s


def test_chunks_keep_the_step_within_the_target_between_tokens() -> None:
    assert longest_step_s(None) > 0.3
    assert longest_step_s(0.1) < 0.11
    assert longest_step_s(0.05) < 0.055


def test_a_target_that_decodes_alone_miss_still_lets_prompts_get_on() -> None:
    driver = Driver(SchedulerConfig(target_itl_s=1e-6))
    driver.join(prefill_tokens_per_s=10.0)
    driver.submit(make_request("stream", 4, 50))
    driver.step()
    driver.submit(make_request("prompt", 100, 2))
    plan = driver.schedule()
    assert plan is not None
    assert (plan.decode_handles, plan.chunk_num_tokens) == ([0], [MIN_CHUNK_TOKENS])


def test_a_prompt_alone_takes_the_whole_token_budget() -> None:
    driver = Driver(SchedulerConfig(target_itl_s=1e-3, max_num_batched_tokens=200))
    driver.join(prefill_tokens_per_s=100.0)
    driver.submit(make_request("a", 300))
    plan = driver.schedule()
    assert plan is not None
    assert plan.chunk_num_tokens == [200]


def test_handles_are_small_and_free_after_the_plan_that_finishes_them() -> None:
    driver = Driver()
    driver.join()
    driver.submit(make_request("a", 4, max_tokens=1))
    driver.submit(make_request("b", 4, max_tokens=9))
    driver.step()
    driver.submit(make_request("c", 4, max_tokens=9))
    finishing = driver.schedule()
    assert finishing is not None
    assert finishing.finished_handles == [0]
    assert [start.handle for start in finishing.starts] == [2]
    driver.submit(make_request("d", 4))
    following = driver.schedule()
    assert following is not None
    assert [start.handle for start in following.starts] == [0]


def test_a_finished_handle_is_told_even_when_nothing_else_is_to_do() -> None:
    driver = Driver()
    driver.join()
    driver.submit(make_request("a", 4, max_tokens=1))
    driver.step()
    plan = driver.schedule()
    assert plan is not None
    assert (plan.finished_handles, plan.num_tokens) == ([0], 0)
    driver.apply(driver.work())
    assert driver.schedule() is None
    assert not driver.workers[R1].sequences


def test_a_block_is_appended_at_the_boundary_alone() -> None:
    driver = Driver()
    driver.join()
    driver.submit(make_request("a", 14, max_tokens=8))
    appends = []
    for _ in range(8):
        driver.step()
        appends.append(list(driver.history[-1].append_handles))
    assert appends == [[], [], [], [0], [], [], [], []]


def test_no_more_sequences_run_than_the_replica_takes() -> None:
    driver = Driver(SchedulerConfig(max_num_seqs=8))
    driver.join(max_num_seqs=3)
    for number in range(9):
        driver.submit(make_request(f"r{number}", 4, max_tokens=3))
    plan = driver.schedule()
    assert plan is not None
    assert len(plan.starts) == 3
    assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (3, 6)
    driver.run()
    assert len(driver.ends) == 9


def test_a_step_that_only_decodes_touches_no_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    driver.join()
    for name in "abcdef":
        driver.submit(make_request(name, 17, 40))
    driver.step()
    driver.step()

    def untouched(self: SequenceTable, row: int) -> Sequence:
        raise AssertionError("a sequence is touched")

    def none_of_them(self: SequenceTable, rows: list[int]) -> list[Sequence]:
        assert not rows, "a sequence is touched"
        return []

    monkeypatch.setattr(SequenceTable, "sequence", untouched)
    monkeypatch.setattr(SequenceTable, "sequences", none_of_them)
    names = []
    for _ in range(8):  # 19 to 27 tokens: none comes to the end of its block
        plan, _ = driver.scheduler.schedule(R1, driver.now)
        assert plan is not None and len(plan.decode_handles) == 6
        result = driver.workers[R1].apply(plan)
        [tokens] = driver.scheduler.apply_result(R1, result, driver.now)
        assert isinstance(tokens, TokensStep)
        names.append(tokens.sequences)
    assert all(sequences is names[0] for sequences in names), "names are gathered anew"
