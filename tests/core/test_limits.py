"""What can never run is refused at once; what outgrows a pool ends; queues are bounded."""

from __future__ import annotations

import pytest

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import FinishReason
from shared.errors import AlreadyExists, InvalidArgument, ResourceExhausted, Unavailable
from shared.ids import RequestId
from tests.core.driver import BLOCK_SIZE, R1, R2, Driver, make_request


def test_a_prompt_beyond_the_pool_is_refused_and_does_not_block_the_queue() -> None:
    """FIELD-FAILURES, part 1: a prompt that fits the context but not the pool blocks the queue."""
    driver = Driver()
    driver.join(num_blocks=8)
    with pytest.raises(InvalidArgument, match="140 tokens"):
        driver.submit(make_request("large", 140))
    driver.submit(request := make_request("small", 5))
    driver.run()
    driver.check_answer(request)


def test_the_largest_prompt_that_can_run_is_taken() -> None:
    driver = Driver()
    driver.join(num_blocks=8)
    with pytest.raises(InvalidArgument):
        driver.submit(make_request("a", 128, max_tokens=1))
    driver.submit(request := make_request("b", 127, max_tokens=1))
    driver.run()
    driver.check_answer(request)


def test_a_sequence_that_fills_the_pool_ends_with_context_limit() -> None:
    """FIELD-FAILURES, part 1: prompt 100 + max_tokens 100 in a pool of 8 x 16 ends, no loop."""
    driver = Driver()
    driver.join(num_blocks=8)
    driver.submit(make_request("a", 100, max_tokens=100))
    driver.run(max_rounds=60)
    assert driver.reason("a") is FinishReason.CONTEXT_LIMIT
    # All 128 slots are computed, and one more token is sampled from them.
    assert len(driver.tokens["a", 0]) == driver.ends["a", 0].num_output_tokens == 129 - 100
    assert driver.scheduler.counters.preemptions == 0


@pytest.mark.parametrize("prompt", [BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE])
@pytest.mark.parametrize("max_tokens", [1, 2, BLOCK_SIZE, BLOCK_SIZE + 1])
def test_no_block_more_than_needed_is_taken(prompt: int, max_tokens: int) -> None:
    """FIELD-FAILURES, part 1: off by one when the last block is just full."""
    driver = Driver()
    driver.join()
    driver.submit(request := make_request("a", prompt, max_tokens))
    driver.run()
    driver.check_answer(request)
    assert driver.peak_blocks == -(-(prompt + max_tokens - 1) // BLOCK_SIZE)


def test_the_waiting_queue_is_bounded_and_choices_count() -> None:
    """FIELD-FAILURES, part 4: unbounded queue; n=4 counts as 4."""
    driver = Driver(SchedulerConfig(max_waiting=5))
    driver.join()
    driver.submit(make_request("a", 4, num_sequences=4))
    with pytest.raises(ResourceExhausted) as refusal:
        driver.submit(make_request("b", 4, num_sequences=2))
    assert (refusal.value.limit, refusal.value.retry_after_s) == ("max_waiting", 1.0)
    driver.submit(make_request("c", 4))
    driver.run()
    driver.submit(make_request("b", 4, num_sequences=2))
    driver.run()


def test_waiting_prompt_tokens_are_bounded() -> None:
    driver = Driver(SchedulerConfig(max_waiting_tokens=20))
    driver.join()
    driver.submit(make_request("a", 12))
    with pytest.raises(ResourceExhausted) as refusal:
        driver.submit(make_request("b", 9))
    assert refusal.value.limit == "max_waiting_tokens"
    driver.submit(make_request("c", 8))
    driver.run()


@pytest.mark.parametrize(
    "config", [SchedulerConfig(max_waiting_tokens=20), SchedulerConfig(max_waiting=3)]
)
def test_a_request_beyond_a_queue_limit_by_itself_waits_for_an_empty_queue(
    config: SchedulerConfig,
) -> None:
    """Else it would be told for ever to try again."""
    driver = Driver(config)
    driver.join()
    driver.submit(first := make_request("a", 10, num_sequences=4))
    large = make_request("b", 10, num_sequences=4)
    with pytest.raises(ResourceExhausted):
        driver.submit(large)
    driver.run()
    driver.submit(large)
    driver.run()
    for request in (first, large):
        driver.check_answer(request)


def test_an_id_in_use_is_refused_and_the_first_stays_intact() -> None:
    """FIELD-FAILURES, part 2: same request id twice; cancel and reuse at once."""
    driver = Driver()
    driver.join()
    driver.submit(first := make_request("a", 6))
    with pytest.raises(AlreadyExists):
        driver.submit(make_request("a", 9))
    driver.run()
    driver.check_answer(first)
    driver.forget()
    driver.submit(make_request("a", 6))
    driver.schedule()
    driver.scheduler.abort(RequestId("a"))
    driver.forget()
    driver.submit(second := make_request("a", 7))
    driver.run()
    driver.check_answer(second)


def test_without_a_replica_that_takes_requests_there_is_no_service() -> None:
    driver = Driver()
    with pytest.raises(Unavailable):
        driver.submit(make_request("a", 4))
    driver.join()
    driver.take(driver.scheduler.drain_replica(R1))
    with pytest.raises(Unavailable):
        driver.submit(make_request("a", 4))
    driver.join(R2)
    driver.submit(make_request("a", 4))


def test_a_refusal_changes_nothing() -> None:
    driver = Driver(SchedulerConfig(max_waiting=1))
    driver.join(num_blocks=4)
    driver.submit(make_request("a", 4))
    for request in (make_request("b", 4), make_request("c", 300), make_request("a", 4)):
        with pytest.raises((ResourceExhausted, InvalidArgument, AlreadyExists)):
            driver.submit(request)
    assert driver.scheduler.num_waiting == 1
    assert [view.request_id for view in driver.scheduler.live_requests()] == ["a"]
    assert driver.scheduler.next_tick() is None
