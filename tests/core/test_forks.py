"""Several choices of one request: one prompt computed, each choice its own text."""

from __future__ import annotations

import pytest

from scheduler_svc.core.config import SchedulerConfig
from shared.ids import RequestId
from shared.plan import CacheOpKind
from tests.core.driver import BLOCK_SIZE, Driver, make_request
from tests.sim.model import answer


@pytest.mark.parametrize(
    "prompt", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE + 5]
)
@pytest.mark.parametrize("budget", [7, 512])
def test_each_choice_equals_its_own_answer(prompt: int, budget: int) -> None:
    """FIELD-FAILURES, part 1: fork with a partly filled last block."""
    driver = Driver(SchedulerConfig(max_num_batched_tokens=budget))
    driver.join()
    driver.submit(request := make_request("a", prompt, 20, num_sequences=3))
    driver.run()
    driver.check_answer(request)
    texts = {tuple(driver.tokens["a", index]) for index in range(3)}
    assert len(texts) == 3, "choices share a seed"


def test_the_prompt_is_computed_once_and_its_open_block_copied() -> None:
    driver = Driver()
    driver.join()
    driver.submit(make_request("a", 2 * BLOCK_SIZE + 5, 4, num_sequences=3))
    driver.step()
    assert driver.scheduler.num_running == 1
    plan = driver.schedule()
    assert plan is not None
    assert [start.num_computed_tokens for start in plan.starts] == [36, 36]
    [copy] = plan.cache_ops
    assert copy.kind is CacheOpKind.COPY
    assert len(copy.source_blocks) == len(set(copy.target_blocks)) == 2
    tables = [list(start.block_table) for start in plan.starts]
    assert tables[0][:2] == tables[1][:2]
    assert len(plan.decode_handles) == 3


def test_choices_wait_until_the_first_has_computed_the_prompt() -> None:
    driver = Driver(SchedulerConfig(max_num_batched_tokens=8))
    driver.join()
    driver.submit(make_request("a", 30, 4, num_sequences=3))
    for _ in range(3):
        driver.step()
    assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (1, 2)
    driver.step()
    driver.step()
    assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (3, 0)
    assert sum(plan.num_tokens for plan in driver.history) == 30 + 1 + 2 * 1


def test_other_choices_go_on_when_one_ends() -> None:
    """FIELD-FAILURES, part 1: choices fall silent when choice 0 ends."""
    expected = [answer(make_request("a", 10, 12), index, BLOCK_SIZE)[0] for index in range(3)]
    stop = expected[0][1]
    driver = Driver()
    driver.join()
    driver.submit(request := make_request("a", 10, 12, num_sequences=3, stop=[stop]))
    driver.run()
    driver.check_answer(request)
    assert len(driver.tokens["a", 0]) == 1
    assert max(len(driver.tokens["a", index]) for index in (1, 2)) > 1


def test_a_stopped_choice_leaves_the_others() -> None:
    driver = Driver()
    driver.join()
    request = make_request("a", 10, 12, num_sequences=2)
    driver.submit(request)
    for _ in range(3):
        driver.step()
    driver.scheduler.finish_sequence(RequestId("a"), 0)
    driver.run()
    assert ("a", 0) not in driver.ends
    assert driver.tokens["a", 1] == answer(request, 1, BLOCK_SIZE)[0]


def test_choices_share_blocks_until_they_part() -> None:
    driver = Driver()
    driver.join()
    driver.submit(make_request("a", 4 * BLOCK_SIZE + 1, 4, num_sequences=4))
    driver.run()
    # Four shared blocks, and an own fifth for each choice.
    assert driver.peak_blocks == 4 + 4


def test_cancel_ends_all_choices_within_two_steps() -> None:
    """FIELD-FAILURES, part 2: cancel with n=4: idle in two steps."""
    driver = Driver()
    driver.join()
    driver.submit(make_request("a", 20, 4000, num_sequences=4))
    for _ in range(6):
        driver.schedule()
        driver.schedule()
        driver.apply(driver.work())
    driver.scheduler.abort(RequestId("a"))
    driver.run(max_rounds=2)
    assert not driver.ends


def test_choices_that_find_no_seat_start_later() -> None:
    driver = Driver(SchedulerConfig(max_num_seqs=2))
    driver.join()
    driver.submit(request := make_request("a", 10, 6, num_sequences=5))
    driver.run()
    driver.check_answer(request)
