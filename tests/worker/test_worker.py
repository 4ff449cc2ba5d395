"""The loop over a real socket: membership, order, repair, and every way to end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from protos.quire.worker.v1 import worker_pb2
from shared.codec import PROTOCOL_VERSION
from shared.model_files import read_model_spec
from shared.plan import SequenceStart, StepPlan
from shared.sampling import SamplingParams
from tests.worker.fake_scheduler import FakeScheduler
from tests.worker.tiny_llama import make_llama, save_safetensors
from worker_svc.__main__ import main
from worker_svc.config import EngineConfig, WorkerConfig
from worker_svc.model_runner import ModelRunner
from worker_svc.worker import Refused, StepFailed, Worker

PROMPT = list(range(3, 12))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_safetensors(make_llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/w"


class RunningWorker:
    """A worker on a thread; `join` gives the exception that ended it."""

    def __init__(self, endpoint: str, model: Path) -> None:
        engine = EngineConfig(model, backend="torch", num_blocks=16, host_bytes=0)
        config = WorkerConfig(engine, worker_id="w0", scheduler_endpoint=endpoint)
        self.stop = threading.Event()
        self.worker = Worker(config, read_model_spec(model), torch.device("cpu"), self.stop)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.worker.run()
        except BaseException as error:
            self.error = error

    def join(self) -> BaseException | None:
        self.thread.join(30)
        assert not self.thread.is_alive()
        return self.error


@pytest.fixture
def running(endpoint: str, model: Path) -> Iterator[RunningWorker]:
    running = RunningWorker(endpoint, model)
    yield running
    running.stop.set()
    running.join()


@pytest.fixture
def scheduler(endpoint: str) -> Iterator[FakeScheduler]:
    with FakeScheduler(endpoint) as scheduler:
        yield scheduler


def first_plan(step: int = 1, base: int = 0, *, reset: bool = False) -> StepPlan:
    return StepPlan(
        step=step,
        base_step=base,
        reset=reset,
        starts=[SequenceStart(0, PROMPT, len(PROMPT), 0, [0], SamplingParams(temperature=0.0))],
        chunk_handles=[0],
        chunk_num_tokens=[len(PROMPT)],
        chunk_samples=[True],
    )


def decode_plan(step: int) -> StepPlan:
    return StepPlan(step=step, base_step=step - 1, decode_handles=[0])


def test_a_whole_life(scheduler: FakeScheduler, running: RunningWorker) -> None:
    register = scheduler.wait_for("register")
    assert (register.worker_id, register.device) == ("w0", "cpu")
    assert register.protocol_version == PROTOCOL_VERSION
    assert register.incarnation
    assert register.world_size == 1
    assert register.model_fingerprint == running.worker._spec.fingerprint
    scheduler.welcome(7)
    ready = scheduler.wait_for("ready")
    assert (ready.num_device_blocks, ready.num_host_blocks, ready.block_size) == (16, 0, 16)
    assert (ready.max_num_batched_tokens, ready.max_num_seqs) == (512, 256)
    assert ready.block_bytes == 2 * 2 * 2 * 16 * 16 * 4
    assert ready.prefill_tokens_per_s > 0
    for plan in (first_plan(), decode_plan(2), decode_plan(3)):  # all at once: run-ahead
        scheduler.plan(plan)
    results = scheduler.results(3)
    assert [result.step for result in results] == [1, 2, 3]
    assert [list(result.handles) for result in results] == [[0]] * 3
    beat = scheduler.wait_for("heartbeat", where=lambda beat: beat.step_finished == 3)
    assert (beat.step_started, beat.load_fraction) == (3, 1.0)
    scheduler.plan(decode_plan(4))
    scheduler.send(drain=worker_pb2.Drain())
    scheduler.wait_for("drain_done")
    assert scheduler.received[-2].step_result.step == 4
    assert {message.epoch for message in scheduler.received[1:]} == {7}
    assert running.join() is None


def test_the_worker_may_start_first(endpoint: str, running: RunningWorker) -> None:
    """FIELD-FAILURES 3: either start order works."""
    assert running.thread.is_alive()
    with FakeScheduler(endpoint) as scheduler:
        scheduler.admit(3)


def test_it_beats_while_it_loads(
    monkeypatch: pytest.MonkeyPatch, scheduler: FakeScheduler, running: RunningWorker
) -> None:
    """FIELD-FAILURES 3: a worker that never gets ready is told from one that is dead."""
    from worker_svc import worker as module

    original, go_on = module.load_engine, threading.Event()  # type: ignore[attr-defined]

    def slow(spec, config, device, progress):  # type: ignore[no-untyped-def]
        progress(0.5)
        assert go_on.wait(30)
        return original(spec, config, device, progress)

    monkeypatch.setattr(module, "load_engine", slow)
    scheduler.wait_for("register")
    scheduler.welcome(1)
    for _ in range(3):
        scheduler.wait_for("heartbeat", where=lambda beat: beat.load_fraction == 0.5)
    go_on.set()
    scheduler.wait_for("ready")


def test_frames_of_another_epoch_and_garbage_are_dropped(
    scheduler: FakeScheduler, running: RunningWorker
) -> None:
    scheduler.admit(5)
    scheduler.plan(first_plan(), epoch=4)
    scheduler.send(epoch=6, drain=worker_pb2.Drain())
    scheduler.send_raw(b"\xff\xff garbage")
    scheduler.send_raw(b"")
    scheduler.plan(first_plan())
    assert scheduler.wait_for("step_result").step == 1
    assert running.worker.num_dropped == 4


def test_a_gap_is_told_once_and_repaired_by_a_reset(
    scheduler: FakeScheduler, running: RunningWorker
) -> None:
    scheduler.admit(1)
    scheduler.plan(first_plan())
    token = scheduler.wait_for("step_result").token_ids[0]
    for step in (3, 4):  # step 2 was lost
        scheduler.plan(decode_plan(step))
    need = scheduler.wait_for("need_full_state")
    assert (need.at_step, need.got_base_step) == (1, 2)
    scheduler.plan(first_plan(5, 1, reset=True))
    scheduler.plan(decode_plan(6))
    again, following = scheduler.results(2)
    assert (again.step, list(again.token_ids), following.step) == (5, [token], 6)
    kinds = [message.WhichOneof("body") for message in scheduler.received]
    assert kinds.count("need_full_state") == 1


def test_a_malformed_plan_is_dropped_and_its_gap_repaired(
    scheduler: FakeScheduler, running: RunningWorker
) -> None:
    scheduler.admit(1)
    scheduler.send(step_plan=worker_pb2.StepPlan(step=1, base_step=0, append_handles=[1]))
    scheduler.plan(decode_plan(2))
    assert scheduler.wait_for("need_full_state").at_step == 0
    assert running.worker.num_dropped == 1


def test_register_again_opens_a_new_membership_without_sequences(
    scheduler: FakeScheduler, running: RunningWorker
) -> None:
    scheduler.admit(1)
    scheduler.plan(first_plan())
    scheduler.wait_for("step_result")
    engine = running.worker._engine
    for _ in range(3):  # one for each frame of the old epoch that the scheduler did not know
        scheduler.send(epoch=0, register_again=worker_pb2.RegisterAgain())
    scheduler.admit(2)
    assert running.worker._engine is engine  # the model stays
    scheduler.plan(first_plan())  # handle 0 is free, and the steps start over
    assert scheduler.wait_for("step_result").step == 1
    kinds = [message.WhichOneof("body") for message in scheduler.received]
    assert kinds.count("register") == 2


def test_a_silent_scheduler_is_left_for_its_successor(
    endpoint: str, running: RunningWorker
) -> None:
    """FIELD-FAILURES 3: workers started apart reconnect to the scheduler's successor."""
    with FakeScheduler(endpoint) as scheduler:
        scheduler.admit(1)
        identity = scheduler.identity
        # Alive on the wire but mute: only the missing heartbeats tell.
        scheduler.wait_for("register", beat=False)
        assert scheduler.identity != identity
    with FakeScheduler(endpoint) as successor:
        successor.admit(1001)
        successor.plan(first_plan())
        assert successor.wait_for("step_result").step == 1


def test_refused_ends_it_with_the_reason(scheduler: FakeScheduler, running: RunningWorker) -> None:
    scheduler.wait_for("register")
    scheduler.send(refused=worker_pb2.Refused(reason="another model"))
    error = running.join()
    assert isinstance(error, Refused)
    assert "another model" in str(error)


def test_a_plan_that_contradicts_the_state_ends_it(
    scheduler: FakeScheduler, running: RunningWorker
) -> None:
    scheduler.admit(1)
    scheduler.plan(StepPlan(step=1, base_step=0, decode_handles=[9]))
    assert "unknown sequences [9]" in scheduler.wait_for("failed").reason
    assert isinstance(running.join(), StepFailed)


def test_an_exception_of_a_step_is_told_before_it_ends(
    monkeypatch: pytest.MonkeyPatch, scheduler: FakeScheduler, running: RunningWorker
) -> None:
    scheduler.admit(1)

    def broken(self: ModelRunner, plan: StepPlan) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(ModelRunner, "execute", broken)
    scheduler.plan(first_plan())
    assert scheduler.wait_for("failed").reason == "step 1 failed: no memory"
    assert isinstance(running.join(), StepFailed)


def test_a_stop_is_told_as_leaving(scheduler: FakeScheduler, running: RunningWorker) -> None:
    scheduler.admit(1)
    running.stop.set()
    scheduler.wait_for("drain_done")
    assert running.join() is None


def spawn(endpoint: str, model: Path, *flags: str) -> list[str]:
    return [
        *(sys.executable, "-m", "worker_svc", "--model", str(model)),
        *("--scheduler-endpoint", endpoint, "--backend", "torch", "--threads", "1"),
        *("--num-blocks", "16", *flags),
    ]


def test_the_process_exits_0_after_sigterm(
    scheduler: FakeScheduler, endpoint: str, model: Path
) -> None:
    process = subprocess.Popen(spawn(endpoint, model), stderr=subprocess.DEVNULL)
    scheduler.admit(1)
    process.send_signal(signal.SIGTERM)
    scheduler.wait_for("drain_done")
    assert process.wait(30) == 0


def test_the_exit_code_is_2_when_refused(
    scheduler: FakeScheduler, endpoint: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    def refuse() -> None:
        scheduler.wait_for("register")
        scheduler.send(refused=worker_pb2.Refused(reason="too many workers"))

    refusing = threading.Thread(target=refuse)
    refusing.start()
    code = main(spawn(endpoint, model)[3:])
    refusing.join()
    for number, handler in zip((signal.SIGTERM, signal.SIGINT), handlers, strict=True):
        signal.signal(number, handler)
    assert code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("too many workers")


def test_it_exits_when_its_parent_is_killed(
    scheduler: FakeScheduler, endpoint: str, model: Path
) -> None:
    """FIELD-FAILURES 3: the scheduler is killed: workers that it spawned exit within 5 s."""
    command = spawn(endpoint, model, "--exit-with-parent")
    script = f"import subprocess; p = subprocess.Popen({command!r}); print(p.pid); p.wait()"
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker_pid = int(parent.stdout.readline())
    scheduler.admit(1)
    descriptor = os.pidfd_open(worker_pid)
    parent.kill()
    parent.wait(10)
    # A pidfd becomes readable when its process has ended.
    readable, _, _ = select.select([descriptor], [], [], 5.0)
    os.close(descriptor)
    assert readable
