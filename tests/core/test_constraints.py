"""Constrained sequences: each token obeys the mask that follows from those before it, whatever
happens in between, and nobody else is held up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core.config import PreemptionMode, SchedulerConfig
from scheduler_svc.core.constraint import ConstraintBroken
from scheduler_svc.core.messages import FailureKind, FinishReason, NewRequest
from shared.plan import TokenMask
from tests.core.driver import R1, R2, Driver, make_request
from tests.sim.constraint import SimConstraint
from tests.sim.model import answer


class Countdown:
    """Allows one token after the other, and is complete after the last; breaks at one of them."""

    def __init__(self, token_ids: list[int], breaks_at: int | None = None) -> None:
        self._left = token_ids
        self._breaks_at = breaks_at

    @property
    def mask(self) -> TokenMask:
        return TokenMask(token_ids=self._left[:1])

    def accept(self, token_id: int) -> bool:
        if token_id == self._breaks_at:
            raise ConstraintBroken("it became too complex")
        assert token_id == self._left[0]
        self._left = self._left[1:]
        return bool(self._left)

    def copy(self) -> Countdown:
        return Countdown(self._left, self._breaks_at)


def constrained(name: str, key: int, max_tokens: int = 40, num_sequences: int = 1) -> NewRequest:
    request = make_request(name, 9, max_tokens, num_sequences=num_sequences)
    return replace(request, constraint=SimConstraint(key))


def test_it_ends_as_complete_with_its_last_token() -> None:
    driver = Driver()
    driver.join()
    request = replace(make_request("a", 5), constraint=Countdown([4, 8, 15]))
    driver.submit(request)
    driver.run()
    assert driver.tokens["a", 0] == [4, 8, 15]
    end = driver.ends["a", 0]
    assert (end.reason, end.num_output_tokens) == (FinishReason.CONSTRAINT_COMPLETE, 3)
    assert end.stop_token_id is None


@pytest.mark.parametrize(
    ("changes", "reason", "tokens"),
    [
        ({"max_tokens": 2}, FinishReason.MAX_TOKENS, [4, 8]),
        ({"max_tokens": 3}, FinishReason.CONSTRAINT_COMPLETE, [4, 8, 15]),
        ({"eos_token_ids": frozenset({8})}, FinishReason.EOS, [4]),
        ({"stop_token_ids": frozenset({15})}, FinishReason.STOP_TOKEN, [4, 8]),
    ],
)
def test_the_other_ends_come_as_before(
    changes: dict[str, object], reason: FinishReason, tokens: list[int]
) -> None:
    driver = Driver()
    driver.join()
    request = replace(make_request("a", 5), constraint=Countdown([4, 8, 15]))
    driver.submit(replace(request, **changes))  # type: ignore[arg-type]
    driver.run()
    assert (driver.tokens["a", 0], driver.reason("a")) == (tokens, reason)


def test_a_constrained_sequence_has_one_token_in_flight_and_others_two() -> None:
    driver = Driver()
    driver.join()
    driver.submit(replace(make_request("a", 5, 30), constraint=Countdown(list(range(20)))))
    driver.submit(make_request("b", 5, 30))
    driver.step()
    handles = {start.token_ids: start.handle for start in driver.history[0].starts}
    guided, free = (handles[make_request(name, 5).prompt_token_ids] for name in "ab")
    first, second = driver.schedule(), driver.schedule()
    assert first is not None and second is not None
    assert list(first.decode_handles) == sorted([guided, free])
    assert list(first.masked_handles) == [guided]
    assert list(second.decode_handles) == [free] and not second.masks
    driver.apply(driver.work())
    third = driver.schedule()
    assert third is not None and guided in third.decode_handles
    driver.run()
    assert driver.tokens["a", 0] == list(range(20))
    driver.check_answer(make_request("b", 5, 30))


def test_a_mask_that_allows_all_is_not_sent() -> None:
    key = next(key for key in range(100) if SimConstraint(key).mask is None)
    driver = Driver()
    driver.join()
    driver.submit(constrained("a", key, max_tokens=1))
    driver.run()
    assert not driver.history[0].masks


def test_each_choice_has_a_constraint_of_its_own() -> None:
    driver = Driver()
    driver.join()
    request = constrained("a", 3, num_sequences=3)
    driver.submit(request)
    driver.run()
    driver.check_answer(request)
    assert len({tuple(driver.tokens["a", index]) for index in range(3)}) == 3


@pytest.mark.parametrize("mode", list(PreemptionMode))
def test_a_preempted_one_goes_on_under_the_same_constraint(mode: PreemptionMode) -> None:
    driver = Driver(SchedulerConfig(preemption_mode=mode, reserve_fraction=0.0))
    driver.join(
        num_blocks=8,
        block_size=4,
        num_host_blocks=8,
        copy_bytes_per_s=1e9,
        prefill_tokens_per_s=1.0,
    )
    requests = [constrained(f"r{key}", key, max_tokens=18) for key in range(4)]
    for request in requests:
        driver.submit(request)
    driver.run()
    for request in requests:
        driver.check_answer(request, block_size=4)
    assert sum(end.num_preemptions for end in driver.ends.values()) > 0


def test_a_lost_replica_leaves_the_constraint_as_it_is() -> None:
    driver = Driver()
    driver.join(R1)
    driver.join(R2)
    requests = [constrained(f"r{key}", key) for key in range(100)]
    requests = [request for request in requests if len(answer(request, 0, 16)[0]) > 8][:4]
    for request in requests:
        driver.submit(request)
    for _ in range(4):
        for replica in (R1, R2):
            while len(driver.plans[replica]) < 2 and driver.schedule(replica) is not None:
                pass
            if driver.plans[replica]:
                driver.apply(driver.work(replica), replica)
    driver.lose(R1)
    driver.run()
    assert driver.recovered
    for request in requests:
        driver.check_answer(request)


def test_a_broken_constraint_fails_its_request_alone() -> None:
    driver = Driver()
    driver.join()
    driver.submit(replace(make_request("a", 5), constraint=Countdown([4, 8, 15], breaks_at=8)))
    driver.submit(make_request("b", 5))
    driver.run()
    assert driver.failed == {"a": FailureKind.SEQUENCE_FAILED}
    driver.check_answer(make_request("b", 5))


def test_both_choices_may_break_in_one_step() -> None:
    driver = Driver()
    driver.join()
    request = make_request("a", 5, num_sequences=2)
    driver.submit(replace(request, constraint=Countdown([4, 8], breaks_at=8)))
    driver.run()
    assert driver.failed == {"a": FailureKind.SEQUENCE_FAILED}
