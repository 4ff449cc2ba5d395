"""Log-probabilities of prompts on their way through the core: every place once, none forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core.config import PreemptionMode, SchedulerConfig
from shared.errors import ProtocolError
from shared.logprobs import NO_LOGPROBS
from tests.core.driver import R1, R2, Driver, make_request
from tests.told import told_of

NUM_TOP = 2


def assert_scored(driver: Driver, name: str, prompt: tuple[int, ...]) -> None:
    """All places from 1 on have come, in order, each as the worker tells it."""
    place = 1
    for event in driver.scored[name]:
        assert event.offset == place
        end = place + len(event.logprobs.log_probs)
        assert event.logprobs == told_of(prompt, range(place, end), NUM_TOP)
        place = end
    assert place == len(prompt)


@pytest.mark.parametrize("mode", list(PreemptionMode))
def test_a_prompt_preempted_while_it_is_scored_loses_no_place(mode: PreemptionMode) -> None:
    """The old one takes the young one's blocks when its prompt is half computed and its last chunk
    is on the way. What that chunk tells is lost, so it must be computed again, not swapped."""
    config = SchedulerConfig(preemption_mode=mode, reserve_fraction=0.0, max_num_batched_tokens=8)
    driver = Driver(config)
    driver.join(
        num_blocks=7,
        num_host_blocks=40,
        copy_bytes_per_s=1e9,
        prefill_tokens_per_s=1.0,
    )
    driver.submit(make_request("old", 30, 40))
    young = replace(make_request("young", 80, 4), num_prompt_logprobs=NUM_TOP)
    driver.submit(young)
    driver.run()
    assert driver.ends["young", 0].num_preemptions
    assert_scored(driver, "young", tuple(young.prompt_token_ids))
    driver.check_answer(young)


def test_a_lost_replica_costs_no_place_and_tells_none_twice() -> None:
    driver = Driver(SchedulerConfig(max_num_batched_tokens=8))
    driver.join(R1)
    request = replace(make_request("r", 50, 4), num_prompt_logprobs=NUM_TOP)
    driver.submit(request)
    for _ in range(3):
        driver.step()
    driver.schedule()
    driver.join(R2)
    driver.lose(R1)
    driver.run()
    assert_scored(driver, "r", tuple(request.prompt_token_ids))
    assert len(driver.scored["r"]) == 7, "three chunks before the loss, and what was left after it"
    driver.check_answer(request)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_a_result_that_tells_too_little_is_refused_and_changes_nothing(field: str) -> None:
    driver = Driver(SchedulerConfig())
    driver.join()
    asked = replace(make_request("r", 20, 4), num_prompt_logprobs=NUM_TOP)
    request = replace(asked, sampling=replace(asked.sampling, num_logprobs=NUM_TOP))
    driver.submit(request)
    driver.schedule()
    result = driver.work()
    silent = (
        replace(result, logprobs=NO_LOGPROBS)
        if field == "logprobs"
        else replace(result, prompt_logprobs=NO_LOGPROBS)
    )
    with pytest.raises(ProtocolError):
        driver.apply(silent)
    driver.apply(result)
    driver.run()
    assert_scored(driver, "r", tuple(request.prompt_token_ids))
    driver.check_answer(request)
