"""A record of random worlds comes to the very same plans; a changed one does not."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from protos.quire.admin.v1 import admin_pb2
from scheduler_svc.config import parse_config
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import FinishReason, NewRequest
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recorder import INPUTS, Record, RecordingScheduler
from scheduler_svc.replay import BrokenRecord, PlanDiffers, main, replay
from scheduler_svc.text.tokenizer import TextModel
from scheduler_svc.value_json import from_json, to_json
from shared.errors import ConfigError
from shared.ids import RequestId
from shared.model_spec import ModelSpec
from shared.sampling import BeamParams, EarlyStopping
from tests.api.fake_worker import joined
from tests.api.serving import SERVING, answer, opened, request, serving
from tests.core.driver import Driver, make_request
from tests.core.test_constraints import Countdown
from tests.sim.model import NUM_TOKEN_IDS
from tests.sim.simulator import Simulator


def record_of(path: Path, seed: int, num_events: int = 250) -> list[bytes]:
    """What a simulated world puts into its scheduler, and the plans it gets."""
    record = Record(path)
    Simulator(seed, partial(RecordingScheduler, record=record)).run(num_events)
    record.close()
    return path.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize("seed", range(12))
def test_a_random_world_is_replayed_plan_by_plan(seed: int, tmp_path: Path) -> None:
    lines = record_of(tmp_path / "record", seed)
    done = replay(lines)
    num_plans = sum(line.startswith(b'["plan"') for line in lines)
    assert done.num_plans == num_plans > 5
    num_answers = sum(line.startswith(b'["constraints"') for line in lines)
    assert done.num_events == len(lines) - num_plans - num_answers - 1
    done.scheduler.check_invariants()


def driven(path: Path) -> list[bytes]:
    """A small record of three requests."""
    record = Record(path)
    driver = Driver()
    driver.scheduler = RecordingScheduler(SchedulerConfig(), b"key", record)
    driver.join()
    for number in range(3):
        driver.submit(make_request(f"r{number}", 20 + number, 5))
    driver.run()
    record.close()
    return path.read_bytes().splitlines(keepends=True)


def test_answers_of_constraints_are_replayed(tmp_path: Path) -> None:
    """A replay has no grammar: a constraint ends or breaks its sequence where it did then."""
    record = Record(tmp_path / "record")
    driver = Driver()
    driver.scheduler = RecordingScheduler(SchedulerConfig(), b"key", record)
    driver.join()
    for name, constraint in {
        "whole": Countdown([4, 8, 15]),
        "broken": Countdown([4, 8, 15], breaks_at=8),
    }.items():
        driver.submit(replace(make_request(name, 5), constraint=constraint))
    driver.run()
    record.close()
    lines = (tmp_path / "record").read_bytes().splitlines(keepends=True)
    done = replay(lines)
    assert driver.reason("whole") is FinishReason.CONSTRAINT_COMPLETE
    for name, text in {"whole": "CONSTRAINT_COMPLETE", "broken": "became too complex"}.items():
        story = done.scheduler.story(RequestId(name))
        assert story is not None and text in story.events[-1].text
    answers = next(n for n, line in enumerate(lines) if b"became" in line)
    with pytest.raises((BrokenRecord, PlanDiffers)):
        replay([*lines[:answers], *lines[answers + 1 :]])
    with pytest.raises(BrokenRecord, match=f"line {answers + 1}:"):
        replay([*lines[:answers], b'["constraints",[3]]\n', *lines[answers + 1 :]])


def test_beam_searches_are_replayed_by_their_candidates(tmp_path: Path) -> None:
    """Forks, copies and chosen tokens come again, also of a search that was preempted; with other
    candidates other tokens are chosen, and the replay says where."""
    record = Record(tmp_path / "record")
    driver = Driver()
    config = SchedulerConfig(vocab_size=NUM_TOKEN_IDS, reserve_fraction=0.0)
    driver.scheduler = RecordingScheduler(config, b"key", record)
    driver.join(num_blocks=8)
    driver.submit(first := make_request("first", 40, 60))
    beam = BeamParams(width=3, early_stopping=EarlyStopping.NEVER, num_return=2)
    driver.submit(search := make_request("search", 20, 20, beam=beam))
    driver.run()
    record.close()
    driver.check_answer(first)
    driver.check_answer(search)
    assert driver.ends["search", 0].num_preemptions > 0
    assert any(plan.forks for plan in driver.history)
    lines = (tmp_path / "record").read_bytes().splitlines(keepends=True)
    assert replay(lines).num_plans == len(driver.history)
    at = next(n for n, line in enumerate(lines) if b'"candidates":[{' in line)
    result = json.loads(lines[at])
    result[2]["candidates"][0]["token_ids"].reverse()
    changed = json.dumps(result).encode() + b"\n"
    with pytest.raises(PlanDiffers) as found:
        replay([*lines[:at], changed, *lines[at + 1 :]])
    assert int(str(found.value).split()[1].rstrip(":")) > at + 1


def test_another_decision_is_found_at_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = driven(tmp_path / "record")
    number = next(n for n, line in enumerate(lines, 1) if line.startswith(b'["plan"'))
    with pytest.raises(PlanDiffers, match=f"line {number}:"):
        replay([*lines[: number - 1], b'["plan","00"]\n', *lines[number:]])
    monkeypatch.setattr("scheduler_svc.core.planner.ADMISSION_WINDOW", 1)
    with pytest.raises(PlanDiffers, match=f"line {number}:"):
        replay(lines)


def test_a_plan_that_was_not_made_then_is_found(tmp_path: Path) -> None:
    lines = [line for line in driven(tmp_path / "record") if not line.startswith(b'["plan"')]
    with pytest.raises(PlanDiffers):
        replay(lines)


def test_a_record_cut_off_by_a_crash_is_replayed_to_its_end(tmp_path: Path) -> None:
    lines = driven(tmp_path / "record")
    half = lines[: len(lines) // 2]
    half[-1] = half[-1][: len(half[-1]) // 2]
    assert replay(half).num_events > 0


@pytest.mark.parametrize(
    "line", [b"nonsense\n", b"{}\n", b'["fly"]\n', b'["tick"]\n', b'["submit",3,4]\n']
)
def test_what_no_recorder_wrote_is_told_by_line(line: bytes, tmp_path: Path) -> None:
    lines = driven(tmp_path / "record")
    with pytest.raises(BrokenRecord, match="line 2"):
        replay([lines[0], line])
    with pytest.raises(BrokenRecord, match="line 1"):
        replay([line])


def test_every_method_that_changes_the_scheduler_is_recorded() -> None:
    """A new event of the core must come into the record too."""
    queries = {"check_invariants", "is_drained", "live_requests", "next_tick", "replicas", "story"}
    methods = {
        name
        for name, member in vars(Scheduler).items()
        if callable(member) and not name.startswith("_")
    }
    assert methods - queries == set(INPUTS)
    assert set(INPUTS) <= vars(RecordingScheduler).keys()


def test_a_full_record_ends_and_the_scheduler_goes_on(tmp_path: Path) -> None:
    record = Record(tmp_path / "record", max_bytes=900)
    driver = Driver()
    driver.scheduler = RecordingScheduler(SchedulerConfig(), b"key", record)
    driver.join()
    driver.submit(request := make_request("a", 20, 5))
    driver.run()
    driver.check_answer(request)
    data = (tmp_path / "record").read_bytes()
    assert len(data) <= 900 and data.endswith(b"\n")


def test_a_record_never_overwrites_and_is_its_owners_alone(tmp_path: Path) -> None:
    Record(tmp_path / "record").close()
    assert (tmp_path / "record").stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError, match="--record"):
        Record(tmp_path / "record")


def test_values_come_back_from_json() -> None:
    request = make_request("a", 3, eos=[5, 2], salt=b"\x00x", deadline_s=1.5, num_sequences=2)
    assert from_json(NewRequest, json.loads(json.dumps(to_json(request)))) == request
    config = parse_config(["--model", "m", "--policy", "fair"], {}).core
    assert from_json(SchedulerConfig, json.loads(json.dumps(to_json(config)))) == config
    with pytest.raises(TypeError):
        to_json(object())


def test_the_command_says_how_it_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = driven(tmp_path / "record")
    assert main([str(tmp_path / "record"), "--story", "r1"]) == 0
    out = capsys.readouterr().out
    assert "all the same" in out and "finished by MAX_TOKENS after 5 tokens" in out
    assert main([str(tmp_path / "record"), "--story", "nobody"]) == 2
    (tmp_path / "changed").write_bytes(b"".join(lines[:-1]) + b'["plan","00"]\n')
    assert main([str(tmp_path / "changed")]) == 1
    assert main([str(tmp_path / "missing")]) == 2


async def test_a_served_record_is_replayed(
    spec: ModelSpec, text_model: TextModel, tmp_path: Path
) -> None:
    path = tmp_path / "record"
    async with serving(spec, text_model, record=path) as served, joined(served.worker()):
        await served.wait_status(SERVING)
        for name in ("one", "two"):
            await answer(served, request("x" * 40, request_id=name))
        stream = await opened(served, request(request_id="three", max_tokens=200))
        stream.cancel()
        await served.wait_idle()
        await served.admin.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest())
    done = replay(path.read_bytes().splitlines(keepends=True))
    assert done.num_plans > 10
    story = done.scheduler.story(RequestId("three"))
    assert story is not None and story.events[-1].text.startswith("aborted")
