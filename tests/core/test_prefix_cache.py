"""Prefix reuse: never wrong text, never nothing left to compute, nothing before its time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.prefix_index import BlockHasher
from shared.ids import RequestId
from tests.core.driver import BLOCK_SIZE, R1, R2, Driver, make_request

PREFIX = [(5 * position) % 49 for position in range(3 * BLOCK_SIZE)]


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_a_cached_prompt_leaves_a_token_to_compute(num_blocks: int) -> None:
    """FIELD-FAILURES, part 1: a prompt of exactly k*B tokens, all cached, leaves nothing."""
    driver = Driver()
    driver.join()
    prompt = PREFIX[: num_blocks * BLOCK_SIZE]
    for name in ("first", "second"):
        driver.submit(request := make_request(name, prompt))
        driver.run()
        driver.check_answer(request)
    assert driver.started["first"].num_cached_tokens == 0
    assert driver.started["second"].num_cached_tokens == (num_blocks - 1) * BLOCK_SIZE


def test_a_shared_prefix_is_computed_once() -> None:
    driver = Driver()
    driver.join()
    requests = [make_request(name, [*PREFIX, number]) for number, name in enumerate("ab")]
    for request in requests:
        driver.submit(request)
        driver.run()
        driver.check_answer(request)
    assert driver.started["b"].num_cached_tokens == len(PREFIX)
    counters = driver.scheduler.counters
    assert (counters.prefix_hit_tokens, counters.prefix_lookup_tokens) == (48, 2 * 49)


def test_the_answer_is_part_of_the_next_prompt_of_a_chat() -> None:
    driver = Driver()
    driver.join()
    driver.submit(make_request("turn1", 20, max_tokens=30))
    driver.run()
    history = [*make_request("turn1", 20).prompt_token_ids, *driver.tokens["turn1", 0]]
    driver.submit(request := make_request("turn2", [*history, 1, 2, 3]))
    driver.run()
    driver.check_answer(request)
    assert driver.started["turn2"].num_cached_tokens == 48  # 49 of the 50 tokens were computed


def num_computed(driver: Driver) -> int:
    """Tokens that all plans so far compute."""
    return sum(plan.num_tokens for plan in driver.history)


def test_a_block_is_not_found_before_its_step_is_back() -> None:
    """FIELD-FAILURES, part 1: a block is published before its content exists."""
    driver = Driver()
    driver.join()
    first, second = (make_request(name, [*PREFIX, number]) for number, name in enumerate("ab"))
    driver.submit(first)
    driver.schedule()
    assert driver.view().num_cached_blocks == 0
    driver.submit(second)
    driver.schedule()
    assert second.request_id not in driver.started, "it started without, or with empty blocks"
    driver.apply(driver.work())
    assert driver.view().num_cached_blocks == 3
    driver.schedule()
    assert driver.started["b"].num_cached_tokens == len(PREFIX)
    driver.run()
    for request in (first, second):
        driver.check_answer(request)


def test_a_prefix_that_several_bring_at_once_is_computed_once_on_each_replica() -> None:
    """FIELD-FAILURES, part 1: 8 same-prefix prompts at once over 2 replicas."""
    driver = Driver()
    driver.join(R1)
    driver.join(R2)
    requests = [make_request(f"r{number}", [*PREFIX, number], 4) for number in range(8)]
    for request in requests:
        driver.submit(request)
    driver.run()
    assert {start.replica for start in driver.started.values()} == {R1, R2}
    cached = sorted(start.num_cached_tokens for start in driver.started.values())
    assert cached == [0] * 2 + [len(PREFIX)] * 6
    assert num_computed(driver) == 2 * len(PREFIX) + 8 * 4
    for request in requests:
        driver.check_answer(request)


def test_who_waits_for_a_prefix_holds_up_nobody() -> None:
    driver = Driver()
    driver.join(max_num_batched_tokens=40)
    for name, prompt in (("leader", PREFIX), ("follower", PREFIX), ("other", 5)):
        driver.submit(make_request(name, prompt, 30))
    driver.schedule()
    driver.schedule()
    assert driver.started.keys() == {"leader", "other"}
    driver.run()
    assert driver.started["follower"].num_cached_tokens == 32


def test_who_waits_for_a_prefix_goes_on_alone_when_it_does_not_come() -> None:
    driver = Driver()
    driver.join(max_num_batched_tokens=16)
    driver.submit(make_request("leader", PREFIX))
    driver.submit(request := make_request("follower", PREFIX))
    driver.step()
    driver.scheduler.abort(RequestId("leader"))
    driver.run()
    driver.check_answer(request)
    assert driver.started["follower"].num_cached_tokens == 16, "what the leader had computed"


def test_nobody_waits_for_one_that_comes_later_in_order() -> None:
    driver = Driver(SchedulerConfig(priority_ageing_s=30))
    driver.join(max_num_batched_tokens=40)
    driver.submit(make_request("late", PREFIX))
    driver.schedule()
    driver.submit(make_request("urgent", PREFIX, priority=1))
    driver.schedule()
    assert "urgent" in driver.started
    driver.run()


def test_a_request_may_bypass_the_cache() -> None:
    driver = Driver()
    driver.join()
    for name, bypass in (("alone", True), ("first", False), ("again", True), ("second", False)):
        driver.submit(request := make_request(name, [*PREFIX, 1], bypass_prefix_cache=bypass))
        driver.run()
        driver.check_answer(request)
    cached = {name: start.num_cached_tokens for name, start in driver.started.items()}
    assert cached == {"alone": 0, "first": 0, "again": 0, "second": len(PREFIX)}


def test_what_was_generated_is_found_from_its_end_on() -> None:
    driver = Driver()
    driver.join()
    driver.submit(make_request("a", 10, 100))
    for _ in range(30):
        driver.step()
    assert driver.view().num_cached_blocks == 0
    driver.scheduler.abort(RequestId("a"))
    assert driver.view().num_cached_blocks == 2, "39 of its tokens are computed"
    driver.run()


def test_blocks_held_free_and_cached_are_told_apart() -> None:
    driver = Driver()
    driver.join(num_blocks=8)
    driver.submit(make_request("a", PREFIX, 1))
    driver.run()
    view = driver.view()
    assert (view.num_free_blocks, view.num_cached_blocks, view.num_evictable_blocks) == (8, 3, 3)
    driver.submit(make_request("b", [*PREFIX, 1], 20))
    driver.step()
    view = driver.view()
    assert (view.num_free_blocks, view.num_cached_blocks, view.num_evictable_blocks) == (4, 3, 0)
    driver.run()


def test_tails_of_chains_are_evicted_first_and_those_of_the_longest_unused_chain() -> None:
    driver = Driver()
    driver.join(num_blocks=8)
    chains = {name: make_request(name, 3 * BLOCK_SIZE, 1).prompt_token_ids for name in "abc"}
    for name in "ab":
        driver.submit(make_request(name, chains[name], 1))
        driver.run()
    driver.submit(make_request("c", chains["c"], 1))  # takes the 2 empty blocks, and a's last
    driver.run()
    driver.forget()
    for name, num_cached_blocks in (("b", 3), ("a", 1)):  # "b" takes one for itself, a's second
        driver.submit(make_request(name, [*chains[name], 1], 1))
        driver.schedule()
        assert driver.started[name].num_cached_tokens == num_cached_blocks * BLOCK_SIZE
        driver.run()


def test_a_failed_step_publishes_nothing() -> None:
    """FIELD-FAILURES, part 1: a failed step publishes nothing."""
    driver = Driver()
    driver.join()
    driver.submit(make_request("bad", PREFIX))
    driver.step(failing=[0])
    assert "bad" in driver.failed
    driver.submit(request := make_request("good", PREFIX))
    driver.run()
    driver.check_answer(request)
    assert driver.started["good"].num_cached_tokens == 0


def test_salts_keep_prefixes_apart() -> None:
    """FIELD-FAILURES, part 4: same cache salt hits, another misses."""
    driver = Driver()
    driver.join()
    for name, salt in (("none", b""), ("x", b"x"), ("x again", b"x"), ("y", b"y")):
        driver.submit(request := make_request(name, PREFIX, salt=salt))
        driver.run()
        driver.check_answer(request)
    cached = {name: start.num_cached_tokens for name, start in driver.started.items()}
    assert cached == {"none": 0, "x": 0, "x again": 32, "y": 0}


def test_a_salt_does_not_pass_for_an_adapter() -> None:
    """FIELD-FAILURES, part 1: salt "x" and adapter "x" do not meet."""
    driver = Driver()
    driver.join()
    pairs = [("x", b""), ("", b"x"), ("", b""), ("x", b"x"), ("xx", b""), ("", b"xx"), ("1:x", b"")]
    for number, (adapter, salt) in enumerate([*pairs, *pairs]):
        new = make_request(f"r{number}", PREFIX, salt=salt)
        driver.submit(request := replace(new, adapter=adapter))
        driver.run()
        driver.check_answer(request)
    cached = [start.num_cached_tokens for start in driver.started.values()]
    assert cached == [0] * len(pairs) + [32] * len(pairs)


def test_colliding_digests_are_misses_and_never_wrong_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FIELD-FAILURES, part 1: with the hash stubbed to 4 bits there must be misses, not wrong
    text."""
    real = BlockHasher.chain

    def four_bits(self: BlockHasher, parent: bytes, packed: bytes, width: int) -> list[bytes]:
        digests = []
        for start in range(0, len(packed), width):
            [digest] = real(self, parent, packed[start : start + width], width)
            parent = bytes([digest[0] & 15])
            digests.append(parent)
        return digests

    monkeypatch.setattr(BlockHasher, "chain", four_bits)
    driver = Driver()
    driver.join(num_blocks=200)
    prompts = [[number, *PREFIX[1:]] for number in range(40)]
    for name in ("first", "repeated", "late"):
        for number, prompt in enumerate(prompts):
            driver.submit(request := make_request(f"{name}{number}", prompt, 4))
            driver.run()
            driver.check_answer(request)
            if name == "first":
                driver.submit(request := make_request(f"at once{number}", prompt, 4))
                driver.run()
                driver.check_answer(request)
    hits = {name: start.num_cached_tokens for name, start in driver.started.items()}
    assert any(hits[f"at once{number}"] for number in range(40)), "nothing is ever found"
    assert sum(hits[f"late{number}"] < 32 for number in range(40)) > 10, "nothing collides"


def test_a_cached_block_is_forgotten_when_it_is_taken() -> None:
    driver = Driver()
    driver.join(num_blocks=6)
    driver.submit(make_request("a", PREFIX, max_tokens=1))
    driver.run()
    driver.submit(make_request("b", 90, max_tokens=1))
    driver.run()
    driver.submit(request := make_request("c", PREFIX, max_tokens=1))
    driver.run()
    driver.check_answer(request)
    assert driver.started["c"].num_cached_tokens == 0


def test_a_flush_forgets_and_counts() -> None:
    driver = Driver()
    driver.join()
    driver.submit(make_request("a", PREFIX, max_tokens=1))
    driver.run()
    assert driver.scheduler.flush_prefix_cache() == 3
    assert driver.scheduler.flush_prefix_cache() == 0
    driver.submit(make_request("b", PREFIX, max_tokens=1))
    driver.run()
    assert driver.started["b"].num_cached_tokens == 0


def test_the_cache_can_be_off() -> None:
    driver = Driver(SchedulerConfig(enable_prefix_cache=False))
    driver.join()
    for name in "ab":
        driver.submit(make_request(name, PREFIX))
        driver.run()
    assert driver.started["b"].num_cached_tokens == 0
    assert driver.view().num_cached_blocks == 0
