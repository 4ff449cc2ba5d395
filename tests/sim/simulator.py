"""A seeded world around the scheduler: clients, workers and every accident, in random order.

After every event the invariants are checked, and every token that a client gets is compared with
the model's own answer at once. `python -m tests.sim --seed S` replays a seed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from scheduler_svc.core.config import PreemptionMode, SchedulerConfig
from scheduler_svc.core.messages import ReplicaCapacity
from scheduler_svc.core.policy import PolicyKind
from scheduler_svc.core.scheduler import Scheduler
from shared.ids import ReplicaId
from shared.plan import StepPlan, StepResult
from tests.sim.clients import Clients
from tests.sim.ledger import BlockLedger
from tests.sim.model import NUM_TOKEN_IDS
from tests.sim.worker import SimWorker

BLOCK_SIZE = 4
MAX_REPLICAS = 3
NUM_BLOCKS = range(6, 15)
"""How many a replica's pool may have."""
SETTLING_ROUNDS = 3000
FAILING_RATE = 0.003
"""Of sequences in a step that fail in it."""
POISONING_RATE = 0.2
"""Of chunks, of which nothing is sampled, that leave poison in their blocks."""


@dataclass(slots=True)
class Link:
    """A replica with what is on its way to it and back."""

    worker: SimWorker
    plans: deque[StepPlan] = field(default_factory=deque)
    results: deque[StepResult] = field(default_factory=deque)
    is_draining: bool = False
    ledger: BlockLedger = field(default_factory=lambda: BlockLedger(BLOCK_SIZE))


class Simulator:
    """One run; `step()` is one random event."""

    def __init__(
        self, seed: int, new_scheduler: Callable[[SchedulerConfig, bytes], Scheduler] = Scheduler
    ) -> None:
        """`new_scheduler` makes the scheduler of its configuration and its key of hashes."""
        self.rng = rng = Random(seed)
        self.config = SchedulerConfig(
            max_num_batched_tokens=rng.choice((4, 8, 16, 64)),
            max_num_seqs=rng.choice((2, 5, 8)),
            max_waiting=rng.choice((6, 30)),
            no_replica_grace_s=rng.choice((0.0, 5.0)),
            enable_prefix_cache=rng.random() < 0.85,
            reserve_fraction=rng.choice((0.0, 0.1)),
            target_itl_s=rng.choice((None, 1e-3, 0.1)),
            run_ahead=rng.random() < 0.85,
            policy=rng.choice(list(PolicyKind)),
            vocab_size=NUM_TOKEN_IDS,
            tenant_weights={"heavy": 3.0},
            preemption_mode=rng.choice(list(PreemptionMode)),
        )
        self.scheduler = new_scheduler(self.config, b"simulated")
        self.now = 0.0
        self.links: dict[ReplicaId, Link] = {}
        self.tally: Counter[str] = Counter()
        self._chaos = rng.choice((0.0, 0.3, 1.0))
        self._num_replicas = 0
        self.clients = Clients(rng, self.scheduler, self.tally, BLOCK_SIZE, NUM_BLOCKS)
        self._join()

    # -- the run ------------------------------------------------------------------------------

    def run(self, num_events: int) -> None:
        """So many random events; then calm, in which every stream must come to its end."""
        for _ in range(num_events):
            self.step()
        self._settle()
        self._check_caches()

    def step(self) -> None:
        """One event."""
        actions = (
            (self._schedule, 30),
            (self._work, 30),
            (self._deliver, 30),
            (self._submit, 12),
            (self._pass_time, 4),
            (self.clients.abort, 2),
            (self.clients.cancel, 1),
            (self.clients.stop, 1),
            (self._join, 1),
            (self._lose, 0.7 * self._chaos),
            (self._drain, 0.5 * self._chaos),
            (self._reset, 0.7 * self._chaos),
            (self._flush, 0.3),
        )
        action = self.rng.choices(
            [action for action, _ in actions], [weight for _, weight in actions]
        )[0]
        action()
        self.scheduler.check_invariants()

    def _settle(self) -> None:
        if not any(not link.is_draining for link in self.links.values()):
            self._join()
        for _ in range(SETTLING_ROUNDS):
            for replica in list(self.links):
                self._schedule(replica)
                self._work(replica, is_calm=True)
                self._deliver(replica)
            self.now += 0.01
            self.clients.take(self.scheduler.tick(self.now))
            self.scheduler.check_invariants()
            if not self.clients.streams and not any(
                link.plans or link.results for link in self.links.values()
            ):
                break
        assert not self.clients.streams, f"never ended: {list(self.clients.streams)}"
        for view in self.scheduler.replicas():
            assert view.num_free_blocks == view.num_blocks, "blocks are lost"
            assert view.num_free_host_blocks == view.num_host_blocks, "host blocks are lost"
        assert self.scheduler.num_waiting == self.scheduler.num_running == 0
        assert not list(self.scheduler.live_requests())

    def _check_caches(self) -> None:
        """Each failure takes the poison out that it came upon, so that no prompt fails for ever."""
        for prompt in self.clients.common_prompts():
            for _ in range(MAX_REPLICAS * NUM_BLOCKS.stop):
                num_failed = self.tally["sequence_failed"]
                self.clients.ask(prompt, self.now)
                self._settle()
                if self.tally["sequence_failed"] == num_failed:
                    break
            else:
                raise AssertionError("a prompt fails for ever")

    def _submit(self) -> None:
        self.clients.submit(self.now)

    # -- replicas -----------------------------------------------------------------------------

    def _pick(self) -> ReplicaId | None:
        return self.rng.choice(list(self.links)) if self.links else None

    def _schedule(self, replica: ReplicaId | None = None) -> None:
        replica = self._pick() if replica is None else replica
        if replica is None:
            return
        plan, events = self.scheduler.schedule(replica, self.now)
        if plan is not None:
            view = next(v for v in self.scheduler.replicas() if v.replica == replica)
            assert plan.num_tokens <= self.config.max_num_batched_tokens, "over the budget"
            assert view.num_running <= self.config.max_num_seqs
            self.links[replica].ledger.sent(plan)
            self.links[replica].plans.append(plan)
            assert len(self.links[replica].plans) + len(self.links[replica].results) <= 2
            for op in plan.cache_ops:
                self.tally[op.kind.name] += 1
        self.clients.take(events)

    def _work(self, replica: ReplicaId | None = None, *, is_calm: bool = False) -> None:
        replica = self._pick() if replica is None else replica
        if replica is None or not self.links[replica].plans:
            return
        link = self.links[replica]
        plan = link.plans.popleft()
        handles = [*plan.decode_handles, *plan.chunk_handles]
        unseen = [
            handle
            for handle, samples in zip(plan.chunk_handles, plan.chunk_samples, strict=True)
            if not samples
        ]
        failing, poisoned = frozenset[int](), frozenset[int]()
        if not is_calm:
            failing = frozenset(h for h in handles if self.rng.random() < FAILING_RATE)
            poisoned = frozenset(h for h in unseen if self.rng.random() < POISONING_RATE)
            self.tally["poisoned"] += len(poisoned)
        result = link.worker.apply(plan, failing, poisoned)
        step_s = 1e-3 + 1e-4 * plan.num_tokens * self.rng.uniform(0.5, 2)
        link.results.append(replace(result, execute_s=step_s))

    def _deliver(self, replica: ReplicaId | None = None) -> None:
        replica = self._pick() if replica is None else replica
        if replica is None:
            return
        link = self.links[replica]
        if link.results:
            link.ledger.answered()
            result = link.results.popleft()
            self.clients.take(self.scheduler.apply_result(replica, result, self.now))
        if link.is_draining and self.scheduler.is_drained(replica):
            self.tally["drained"] += 1
            del self.links[replica]
            self.clients.take(self.scheduler.replica_lost(replica))

    def _join(self) -> None:
        if len(self.links) >= MAX_REPLICAS:
            return
        self._num_replicas += 1
        replica = ReplicaId(self._num_replicas)
        num_blocks, num_host_blocks = self.rng.choice(NUM_BLOCKS), self.rng.choice((0, 2, 16))
        self.links[replica] = Link(SimWorker(num_blocks, num_host_blocks, BLOCK_SIZE))
        capacity = ReplicaCapacity(
            num_device_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=1024,
            max_num_seqs=64,
            block_bytes=100,
            copy_bytes_per_s=self.rng.choice((0.0, 1e6)),
            prefill_tokens_per_s=self.rng.choice((0.0, 100.0)),
        )
        self.clients.take(self.scheduler.replica_joined(replica, capacity))

    def _lose(self) -> None:
        replica = self._pick()
        if replica is not None:
            del self.links[replica]
            self.clients.take(self.scheduler.replica_lost(replica))
            self.tally["lost"] += 1

    def _drain(self) -> None:
        replica = self._pick()
        if replica is not None:
            self.links[replica].is_draining = True
            self.clients.take(self.scheduler.drain_replica(replica))

    def _reset(self) -> None:
        """A plan frame is lost: the results before it arrive, those after it never come."""
        replica = self._pick()
        if replica is None or not self.links[replica].plans:
            return
        link = self.links[replica]
        while link.results:
            link.ledger.answered()
            result = link.results.popleft()
            self.clients.take(self.scheduler.apply_result(replica, result, self.now))
        link.plans.clear()
        link.ledger.void()
        self.scheduler.reset_replica(replica, link.worker.step)
        self.tally["reset"] += 1

    def _flush(self) -> None:
        self.scheduler.flush_prefix_cache()

    def _pass_time(self) -> None:
        self.now += self.rng.choice((0.1, 1.0, 4.0))
        due_s = self.scheduler.next_tick()
        events = self.scheduler.tick(self.now)
        assert bool(events) == (due_s is not None and due_s <= self.now)
        after_s = self.scheduler.next_tick()
        assert after_s is None or after_s > self.now, "tick left something undone"
        self.clients.take(events)
