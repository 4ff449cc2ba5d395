"""Order: by arrival, by priority with an ageing bound, and in turns between tenants."""

from __future__ import annotations

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.policy import AgedPriority, FairShare, PolicyKind
from shared.ids import RequestId
from shared.sampling import BeamParams, EarlyStopping
from tests.core.driver import Driver, make_request


def test_priority_goes_before_arrival_and_arrival_before_choice() -> None:
    policy = AgedPriority(ageing_s=10.0)
    order = [
        policy.order_key(priority=1, arrival_s=5.0, arrival_number=3, sequence_index=0),
        policy.order_key(priority=0, arrival_s=0.0, arrival_number=1, sequence_index=0),
        policy.order_key(priority=0, arrival_s=0.0, arrival_number=1, sequence_index=1),
        policy.order_key(priority=0, arrival_s=0.0, arrival_number=2, sequence_index=0),
        policy.order_key(priority=-1, arrival_s=0.0, arrival_number=0, sequence_index=0),
    ]
    assert order == sorted(order)


def test_endless_high_priority_does_not_starve_a_low_one() -> None:
    """FIELD-FAILURES, part 1: low priority starves under endless high priority."""
    driver = Driver(SchedulerConfig(max_num_seqs=1, priority_ageing_s=10.0))
    driver.join()
    driver.submit(make_request("low", 4, max_tokens=2))
    for number in range(40):
        driver.submit(make_request(f"high{number}", 4, max_tokens=1, priority=2))
        driver.now += 1.0
        driver.step()
        if "low" in driver.started:
            break
    assert 20.0 <= driver.started["low"].started_s <= 22.0


def test_higher_priority_starts_first() -> None:
    driver = Driver(SchedulerConfig(max_num_seqs=1))
    driver.join()
    for name, priority in (("a", 0), ("b", 5), ("c", 5), ("d", 9)):
        driver.submit(make_request(name, 4, max_tokens=1, priority=priority))
    driver.run()
    assert list(driver.started) == ["d", "b", "c", "a"]


def test_first_come_first_served_knows_no_priority() -> None:
    driver = Driver(SchedulerConfig(max_num_seqs=1, policy=PolicyKind.FCFS))
    driver.join()
    for name, priority in (("a", 0), ("b", 5), ("c", 9)):
        driver.submit(make_request(name, 4, max_tokens=1, priority=priority))
    driver.run()
    assert list(driver.started) == ["a", "b", "c"]


# -- fairness between tenants ---------------------------------------------------------------------


def served_tokens(
    weights: dict[str, float], sizes: dict[str, int], num_requests: int
) -> list[float]:
    """Tokens of each tenant in `sizes` over its weight, after `num_requests` one by one, where
    each tenant always has requests of 4 prompt tokens and so many output tokens waiting."""
    policy = FairShare(ageing_s=1.0, quantum_tokens=100, weights=weights)
    served = dict.fromkeys(sizes, 0)
    for tenant in sizes:
        policy.enter(tenant)
    for _ in range(num_requests):
        tenant = next(policy.turns({tenant: iter([4, 4]) for tenant in sizes}))
        policy.charge(tenant, 4)
        policy.charge(tenant, sizes[tenant])
        served[tenant] += 4 + sizes[tenant]
    return [tokens / weights.get(tenant, 1.0) for tenant, tokens in served.items()]


def test_tenants_get_equal_tokens_however_their_requests_are_cut() -> None:
    small, large = served_tokens({}, {"a": 5, "b": 500}, num_requests=5000)
    assert abs(small - large) <= 100 + 504


def test_a_weight_is_a_share_of_tokens() -> None:
    light, heavy = served_tokens({"b": 3.0}, {"a": 20, "b": 20}, num_requests=1000)
    assert abs(light - heavy) <= 100 + 24


def test_a_tenant_with_a_long_queue_does_not_hold_up_another() -> None:
    driver = Driver(SchedulerConfig(max_num_seqs=1, policy=PolicyKind.FAIR))
    driver.join(num_blocks=200)
    for number in range(50):
        driver.submit(make_request(f"busy{number}", 1000, max_tokens=1, tenant="busy"))
    for _ in range(8):
        driver.step()
    driver.submit(make_request("new", 1000, max_tokens=1, tenant="other"))
    for _ in range(8):
        driver.step()
    assert "new" in driver.started


def test_beams_are_on_their_tenants_account() -> None:
    """What each beam of a search generated counts, as the choices of a request do."""
    driver = Driver(SchedulerConfig(policy=PolicyKind.FAIR))
    driver.join()
    beam = BeamParams(width=3, early_stopping=EarlyStopping.NEVER)
    driver.submit(request := make_request("beams", 5, 8, tenant="beams", beam=beam))
    driver.submit(make_request("choices", 5, 8, tenant="choices", num_sequences=3))
    driver.run()
    driver.check_answer(request)
    policy = driver.scheduler._policy
    assert isinstance(policy, FairShare)
    # The first step of a search is its one beam's; choices share their prompt.
    assert policy._served == {"beams": 5 + 1 + 7 * 3, "choices": 5 + 3 * 8}


def test_an_abandoned_search_is_paid_for_as_far_as_it_came() -> None:
    driver = Driver(SchedulerConfig(policy=PolicyKind.FAIR))
    driver.join()
    driver.submit(make_request("beams", 5, 50, beam=BeamParams(width=3)))
    for _ in range(4):
        driver.step()
    driver.scheduler.abort(RequestId("beams"))
    policy = driver.scheduler._policy
    assert isinstance(policy, FairShare)
    assert policy._served == {"default": 5 + 1 + 3 * 3}


def test_nobody_saves_up_by_being_idle() -> None:
    policy = FairShare(ageing_s=1.0, quantum_tokens=10)
    policy.enter("busy")
    for _ in range(100):
        policy.charge("busy", 50)
    policy.enter("idle")
    turns = policy.turns({"busy": iter([10] * 6), "idle": iter([10] * 12)})
    assert list(turns).index("busy") <= 6


def test_within_a_tenant_priority_counts() -> None:
    driver = Driver(SchedulerConfig(max_num_seqs=1, policy=PolicyKind.FAIR))
    driver.join()
    for name, priority in (("a", 0), ("b", 5), ("c", 9)):
        driver.submit(make_request(name, 4, max_tokens=1, priority=priority, tenant="one"))
    driver.run()
    assert list(driver.started) == ["c", "b", "a"]


def test_a_preempted_sequence_returns_before_new_ones_of_any_tenant() -> None:
    driver = Driver(SchedulerConfig(policy=PolicyKind.FAIR, reserve_fraction=0.0))
    driver.join(num_blocks=6)
    requests = [make_request(f"r{n}", 30, 40, tenant="greedy") for n in range(2)]
    for request in requests:
        driver.submit(request)
    while not driver.scheduler.counters.preemptions:
        driver.step()
    driver.submit(late := make_request("late", 30, 10, tenant="modest"))
    driver.run()
    for request in (*requests, late):
        driver.check_answer(request)
    assert list(driver.ends)[-1] == ("late", 0)
