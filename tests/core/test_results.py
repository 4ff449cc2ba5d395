"""Results: stops known a step late, failures of one sequence, and nothing that doesn't fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core.messages import FailureKind, FinishReason
from scheduler_svc.core.sequence_table import TAIL_RESULTS
from shared.errors import ProtocolError
from shared.ids import RequestId
from shared.plan import Candidates, SequenceFailure, StepResult
from shared.sampling import BeamParams
from tests.core.driver import BLOCK_SIZE, R1, Driver, make_request
from tests.sim.model import answer

FREE = answer(make_request("a", 10, 30), 0, BLOCK_SIZE)[0]
"""What the model says without any stop."""


def first_of_its_kind(tokens: list[int], after: int) -> int:
    """A position beyond `after` whose token has not come before."""
    return next(at for at in range(after, len(tokens)) if tokens[at] not in tokens[:at])


@pytest.mark.parametrize("kind", [FinishReason.EOS, FinishReason.STOP_TOKEN])
def test_a_stop_ends_without_its_token_and_drops_the_overshoot(kind: FinishReason) -> None:
    at = first_of_its_kind(FREE, 3)
    ids = [FREE[at]]
    driver = Driver()
    driver.join()
    eos, stop = (ids, ()) if kind is FinishReason.EOS else ((), ids)
    driver.submit(make_request("a", 10, 30, eos=eos, stop=stop))
    driver.run()
    end = driver.ends["a", 0]
    assert driver.tokens["a", 0] == FREE[:at]
    assert (end.reason, end.stop_token_id, end.num_output_tokens) == (kind, ids[0], at + 1)


def test_end_of_sequence_as_the_last_allowed_token_is_end_of_sequence() -> None:
    at = first_of_its_kind(FREE, 2)
    driver = Driver()
    driver.join()
    driver.submit(make_request("a", 10, at + 1, eos=[FREE[at]]))
    driver.run()
    assert driver.reason("a") is FinishReason.EOS


def test_many_stop_ids_are_all_heard() -> None:
    at = first_of_its_kind(FREE, 2)
    driver = Driver()
    driver.join()
    driver.submit(make_request("b", 5, 4, stop=[97]))
    never = range(100, 120)
    driver.submit(make_request("a", 10, 30, stop=[*never, FREE[at]]))
    driver.run()
    assert driver.reason("a") is FinishReason.STOP_TOKEN
    assert driver.reason("b") is FinishReason.MAX_TOKENS


def test_one_failing_sequence_is_told_and_the_others_go_on() -> None:
    """FIELD-FAILURES, part 1: an error in one sequence's prefill is lost when others decode."""
    driver = Driver()
    driver.join()
    driver.submit(good := make_request("good", 10, 30))
    driver.step()
    driver.submit(make_request("bad", 12, 30))
    driver.schedule()
    driver.schedule()
    driver.apply(driver.work(failing=[1]))
    assert driver.failed == {"bad": FailureKind.SEQUENCE_FAILED}
    driver.run()
    driver.check_answer(good)
    assert ("bad", 0) not in driver.tokens


def test_a_failure_of_one_choice_fails_its_request() -> None:
    driver = Driver()
    driver.join()
    driver.submit(make_request("a", 10, 30, num_sequences=3))
    for _ in range(3):
        driver.step()
    driver.step(failing=[1])
    assert driver.failed == {"a": FailureKind.SEQUENCE_FAILED}
    driver.run()
    assert not driver.ends


def test_a_long_answer_comes_whole_and_is_known_after_its_end() -> None:
    driver = Driver()
    driver.join()
    num_tokens = 2 * TAIL_RESULTS + 3
    driver.submit(request := make_request("long", 5, num_tokens))
    driver.run()
    driver.check_answer(request)
    history = [*request.prompt_token_ids, *driver.tokens["long", 0]]
    driver.submit(make_request("next", history, 1))
    driver.run()
    num_blocks = (len(history) - 1) // BLOCK_SIZE
    assert driver.started["next"].num_cached_tokens == num_blocks * BLOCK_SIZE


def test_cancel_deadline_and_end_in_one_step_free_once() -> None:
    """FIELD-FAILURES, part 1: cancel, deadline and natural end race in one step."""
    driver = Driver()
    driver.join()
    driver.submit(make_request("a", 10, 2, queue_timeout_s=1.0))
    driver.schedule()
    driver.schedule()
    driver.apply(driver.work())
    result = driver.work()
    driver.scheduler.finish_sequence(RequestId("a"), 0)
    driver.scheduler.abort(RequestId("a"))
    driver.now = 1.0
    driver.take(driver.scheduler.tick(driver.now))
    driver.apply(result)
    driver.scheduler.abort(RequestId("a"))
    driver.scheduler.finish_sequence(RequestId("a"), 0)
    driver.scheduler.finish_sequence(RequestId("a"), 7)
    driver.run()
    assert not driver.ends
    assert not driver.failed


def damaged(result: StepResult) -> dict[str, StepResult]:
    handles, tokens = list(result.handles), list(result.token_ids)
    return {
        "old step": replace(result, step=result.step - 1),
        "step to come": replace(result, step=result.step + 1),
        "missing row": replace(result, handles=handles[:-1], token_ids=tokens[:-1]),
        "missing token": replace(result, token_ids=tokens[:-1]),
        "strange row": replace(result, handles=[*handles[:-1], 9]),
        "other order": replace(result, handles=handles[::-1]),
        "doubled row": replace(result, handles=[handles[0]] * len(handles)),
        "negative token": replace(result, token_ids=[-1, *tokens[1:]]),
        "huge token": replace(result, token_ids=[1 << 32, *tokens[1:]]),
        "strange failure": replace(result, failures=[SequenceFailure(9, "")]),
        "failed and sampled": replace(result, failures=[SequenceFailure(handles[0], "")]),
        "failed twice": replace(
            result,
            handles=handles[1:],
            token_ids=tokens[1:],
            failures=[SequenceFailure(handles[0], "")] * 2,
        ),
    }


@pytest.mark.parametrize("damage", damaged(StepResult(5, [0, 1, 2], [1, 2, 3])))
def test_a_result_that_does_not_fit_changes_nothing(damage: str) -> None:
    driver = Driver()
    driver.join()
    requests = [make_request(f"r{number}", 10, 8) for number in range(3)]
    for request in requests:
        driver.submit(request)
    driver.step()
    driver.schedule()
    driver.schedule()
    result = driver.work()
    with pytest.raises(ProtocolError):
        driver.apply(damaged(result)[damage])
    driver.apply(result)
    driver.run()
    for request in requests:
        driver.check_answer(request)


def test_a_beam_gives_as_many_candidates_as_were_asked_for() -> None:
    """With fewer a search could end with fewer answers than its client waits for."""
    driver = Driver()
    driver.join()
    driver.submit(request := make_request("a", 10, 8, beam=BeamParams(width=3, num_return=3)))
    driver.step()
    driver.schedule()
    result = driver.work()
    first, *others = result.candidates
    asked = len(first.token_ids)
    for ids, log_probs in (
        ([], []),
        (first.token_ids[:-1], first.log_probs[:-1]),
        ([*first.token_ids, 49], [*first.log_probs, -9.0]),
        ([first.token_ids[0]] * asked, first.log_probs),
        (first.token_ids, first.log_probs[:-1]),
    ):
        false = replace(result, candidates=[Candidates(first.handle, ids, log_probs), *others])
        with pytest.raises(ProtocolError, match="candidates"):
            driver.apply(false)
    driver.apply(result)
    driver.run()
    driver.check_answer(request)


def test_a_small_vocabulary_bounds_the_candidates() -> None:
    """A beam of this width and these ends needs more candidates than there are tokens."""
    driver = Driver()
    driver.join()
    beam = BeamParams(width=16)
    driver.submit(request := make_request("a", 10, 4, eos=[1, 2], stop=[3], beam=beam))
    driver.run()
    driver.check_answer(request)
    assert max(start.num_candidates for plan in driver.history for start in plan.starts) == 50


def test_a_result_without_a_plan_is_refused() -> None:
    driver = Driver()
    driver.join()
    with pytest.raises(ProtocolError, match="in flight are"):
        driver.apply(StepResult(1, [], []), R1)
