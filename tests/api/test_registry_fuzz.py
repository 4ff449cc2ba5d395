"""Random frames at the registry: nothing raises, and what comes out stays consistent."""

from __future__ import annotations

import random

import pytest

from protos.quire.worker.v1 import worker_pb2
from scheduler_svc.config import WorkerPlaneConfig
from scheduler_svc.membership import WorkerLost, WorkerReady
from scheduler_svc.workers import WorkerRegistry
from shared.codec import PROTOCOL_VERSION
from shared.ids import ReplicaId
from shared.plan import StepPlan

INTEGERS = (0, 1, 2, 3, 64, 2**31 - 1, 2**32 - 1)
NUMBERS = (0.0, 1.0, -1.0, float("nan"), float("inf"))


def random_message(chance: random.Random, epochs: range) -> worker_pb2.WorkerMessage:
    """A well-formed message that may say anything."""

    def number() -> int:
        return chance.choice(INTEGERS)

    message = worker_pb2.WorkerMessage(epoch=chance.choice(epochs))
    kind = chance.randrange(7)
    if kind == 0:
        message.register.protocol_version = chance.choice((PROTOCOL_VERSION, number()))
        message.register.worker_id = chance.choice(("a", "b", "", "x" * 65))
        message.register.incarnation = chance.randrange(4)
        message.register.model_fingerprint = chance.choice(("model", "model", "other"))
        message.epoch = 0
    elif kind == 1:
        message.ready.num_device_blocks = number()
        message.ready.block_size = chance.choice((16, number()))
        message.ready.max_num_batched_tokens = number()
        message.ready.max_num_seqs = number()
        message.ready.prefill_tokens_per_s = chance.choice(NUMBERS)
    elif kind == 2:
        message.step_result.step = chance.randrange(4)
        message.step_result.handles.extend(number() for _ in range(chance.randrange(3)))
        message.step_result.token_ids.extend(number() for _ in range(chance.randrange(3)))
        message.step_result.execute_s = chance.choice(NUMBERS)
    elif kind == 3:
        message.heartbeat.step_started = number()
        message.heartbeat.load_fraction = chance.choice(NUMBERS)
    elif kind == 4:
        message.need_full_state.at_step = number()
        message.need_full_state.got_base_step = chance.randrange(4)
    elif kind == 5:
        message.drain_done.SetInParent()
    else:
        message.failed.reason = "x" * chance.randrange(1000)
    return message


@pytest.mark.parametrize("seed", range(20))
def test_random_frames_never_raise(seed: int) -> None:
    chance = random.Random(seed)
    registry = WorkerRegistry(
        WorkerPlaneConfig(max_workers=3),
        model_fingerprint="model",
        vocab_size=100,
        first_epoch=1,
        now=0.0,
    )
    known: set[ReplicaId] = set()
    now = 0.0
    for _ in range(500):
        now += chance.choice((0.0, 0.1, 0.4))
        identity = chance.choice((b"1", b"2", b"3"))
        members = registry.members()
        newest = members[-1].epoch if members else 1
        frame = random_message(chance, range(max(0, newest - 2), newest + 2)).SerializeToString()
        if chance.random() < 0.1:
            frame = chance.randbytes(20)
        if chance.random() < 0.1:
            registry.peer_gone(identity)
        for event in [*registry.handle_frame(identity, frame, now), *registry.sweep(now)]:
            if isinstance(event, WorkerReady):
                assert event.replica not in known
                known.add(event.replica)
            if isinstance(event, WorkerLost):
                known.remove(event.replica)
        # Every replica that the engine knows is a member, and nothing outlives its bounds.
        assert known <= {member.replica for member in registry.members()}
        assert len(registry.members()) <= 3
        assert registry.next_sweep_s() >= 0
        for replica in known:
            if chance.random() < 0.5:
                plan = StepPlan(step=chance.randrange(1, 4), base_step=0)
                registry.send_plan(replica, plan, now)
        registry.outbox.clear()
    assert sum(registry.counters.values()) > 0, f"seed {seed} met no bad frame"
