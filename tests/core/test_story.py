"""A request's story tells every turn once, in order, and is bounded."""

from __future__ import annotations

from scheduler_svc.core.config import PreemptionMode, SchedulerConfig
from shared.ids import RequestId
from tests.core.driver import R1, R2, Driver, make_request


def texts(driver: Driver, name: str) -> list[str]:
    story = driver.scheduler.story(RequestId(name))
    assert story is not None
    return [event.text for event in story.events]


def kinds(driver: Driver, name: str) -> list[str]:
    """The first word of each event."""
    return [text.split(maxsplit=1)[0] for text in texts(driver, name)]


def test_a_plain_request_is_submitted_runs_and_finishes() -> None:
    driver = Driver()
    driver.join()
    driver.now = 1.0
    driver.submit(make_request("a", 20, max_tokens=5, tenant="acme", priority=2))
    driver.now = 3.0
    driver.run()
    assert texts(driver, "a") == [
        "submitted by acme: 20 prompt tokens, up to 5 more, 1 choice(s), priority 2; 0 wait "
        "before it",
        "runs on replica 1 from step 1: 0 of 20 tokens cached",
        "finished by MAX_TOKENS after 5 tokens",
    ]
    story = driver.scheduler.story(RequestId("a"))
    assert story is not None
    assert [event.at_s - story.submitted_s for event in story.events] == [0.0, 2.0, 2.0]
    assert (story.is_live, story.num_dropped) == (False, 0)


def test_steady_steps_are_no_events() -> None:
    driver = Driver()
    driver.join()
    driver.submit(make_request("a", 20, max_tokens=500))
    for _ in range(300):
        driver.step()
    story = driver.scheduler.story(RequestId("a"))
    assert story is not None and story.is_live and story.num_events == 2


def test_chunks_are_told_in_bulk() -> None:
    driver = Driver(SchedulerConfig(max_num_batched_tokens=16))
    driver.join()
    driver.submit(make_request("a", 40, max_tokens=2))
    driver.run()
    assert "computes 40 tokens in 3 chunks of 8 to 16, the last in step 3" in texts(driver, "a")


def test_who_waits_for_blocks_and_who_lost_them_to_whom_is_told() -> None:
    for mode, how in ((PreemptionMode.SWAP, "swapped"), (PreemptionMode.RECOMPUTE, "dropped")):
        driver = Driver(SchedulerConfig(reserve_fraction=0.0, preemption_mode=mode))
        driver.join(num_blocks=6, num_host_blocks=6)
        for name in ("first", "second", "third"):
            driver.submit(make_request(name, 30, 40))
        driver.run()
        [preempted] = [text for text in texts(driver, "second") if "preempted" in text]
        assert "its blocks go to first" in preempted and how in preempted
        assert "2 wait before it" in texts(driver, "third")[0]
        if mode is PreemptionMode.SWAP:
            assert "resumes" in kinds(driver, "second")


def test_blocks_that_are_short_are_told_once_a_wait() -> None:
    driver = Driver()
    driver.join(num_blocks=4)
    driver.submit(make_request("first", 30, 20))
    driver.submit(make_request("second", 60, 3))
    driver.run()
    assert kinds(driver, "second") == ["submitted", "waits", "runs", "finished"]


def test_loss_and_recovery_are_told() -> None:
    driver = Driver()
    driver.join(R1)
    driver.submit(make_request("a", 20, 9))
    driver.step(R1)
    driver.join(R2)
    driver.lose(R1)
    driver.run()
    assert kinds(driver, "a") == ["submitted", "runs", "replica", "runs", "finished"]
    assert texts(driver, "a")[2] == "replica 1 was lost: it waits to go on"


def test_each_choice_is_told_by_its_number() -> None:
    driver = Driver()
    driver.join()
    driver.submit(make_request("a", 20, 4, num_sequences=3))
    driver.run()
    story = driver.scheduler.story(RequestId("a"))
    assert story is not None
    ends = [event.sequence_index for event in story.events if "finished" in event.text]
    assert sorted(index for index in ends if index is not None) == [0, 1, 2]


def test_an_abort_and_a_cancel_are_told() -> None:
    driver = Driver()
    driver.join()
    for name in ("left", "cancelled"):
        driver.submit(make_request(name, 4))
    driver.scheduler.abort(RequestId("left"))
    driver.scheduler.cancel(RequestId("cancelled"))
    assert kinds(driver, "left") == ["submitted", "aborted:"]
    assert texts(driver, "cancelled")[-1] == "finished by CANCELLED"


def test_old_events_and_old_stories_make_room() -> None:
    driver = Driver(SchedulerConfig(max_story_events=2, max_finished_stories=3))
    driver.join()
    for number in range(5):
        driver.submit(make_request(f"r{number}", 4, max_tokens=2))
        driver.run()
    known = [driver.scheduler.story(RequestId(f"r{number}")) for number in range(5)]
    assert [story is not None for story in known] == [False, False, True, True, True]
    assert known[4] is not None
    assert (len(known[4].events), known[4].num_dropped) == (2, 1)


def test_an_id_used_again_tells_of_the_live_request() -> None:
    driver = Driver()
    driver.join()
    for _ in range(2):
        driver.submit(make_request("a", 4, max_tokens=2))
        assert len(texts(driver, "a")) == 1
        driver.run()
        driver.forget()
