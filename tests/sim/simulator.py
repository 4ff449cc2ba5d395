"""A seeded world around the scheduler: clients, workers and every accident, in random order.

After every event the invariants are checked, and every token that a client gets is compared with
the model's own answer at once. `python -m tests.sim --seed S` replays a seed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from random import Random

from scheduler_svc.core.config import PreemptionMode, SchedulerConfig
from scheduler_svc.core.messages import (
    Event,
    FailureKind,
    FinishReason,
    NewRequest,
    PromptScored,
    ReplicaCapacity,
    RequestFailed,
    RequestRecovered,
    RequestStarted,
    SequenceFinished,
    TokensAppended,
    TokensStep,
)
from scheduler_svc.core.policy import PolicyKind
from scheduler_svc.core.scheduler import Scheduler
from shared.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, Unavailable
from shared.ids import ReplicaId, RequestId
from shared.plan import StepPlan, StepResult
from shared.sampling import BeamParams, EarlyStopping, SamplingParams
from tests.sim.constraint import SimConstraint
from tests.sim.ledger import BlockLedger
from tests.sim.model import NUM_TOKEN_IDS, answers_of, is_beam_answer
from tests.sim.scores import ScoreBook, wanted
from tests.sim.worker import SimWorker

BLOCK_SIZE = 4
MAX_REPLICAS = 3
NUM_BLOCKS = range(6, 15)
"""How many a replica's pool may have."""
SETTLING_ROUNDS = 3000


@dataclass(slots=True)
class Stream:
    """What one sequence's client knows, and what it must come to."""

    expected: list[int]
    reason: FinishReason
    received: list[int] = field(default_factory=list)
    is_open: bool = True


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

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.config = SchedulerConfig(
            max_num_batched_tokens=rng.choice((4, 8, 16, 64)),
            max_num_seqs=rng.choice((2, 5, 8)),
            max_waiting=rng.choice((6, 30)),
            no_replica_grace_s=rng.choice((0.0, 5.0)),
            enable_prefix_cache=rng.random() < 0.85,
            reserve_fraction=rng.choice((0.0, 0.1)),
            target_itl_s=rng.choice((None, 1e-3, 0.1)),
            policy=rng.choice(list(PolicyKind)),
            vocab_size=NUM_TOKEN_IDS,
            tenant_weights={"heavy": 3.0},
            preemption_mode=rng.choice(list(PreemptionMode)),
        )
        self.scheduler = Scheduler(self.config, b"simulated")
        self.now = 0.0
        self.links: dict[ReplicaId, Link] = {}
        self.streams: dict[RequestId, list[Stream]] = {}
        self._scores = ScoreBook()
        self._searches: dict[RequestId, NewRequest] = {}
        self.tally: dict[str, int] = {}
        self._chaos = rng.choice((0.0, 0.3, 1.0))
        self._num_replicas = 0
        self._num_requests = 0
        self._prefixes = [self._tokens(rng.randint(4, 16)) for _ in range(3)]
        self._join()

    # -- the run ------------------------------------------------------------------------------

    def run(self, num_events: int) -> None:
        """So many random events; then calm, in which every stream must come to its end."""
        for _ in range(num_events):
            self.step()
        self._settle()

    def step(self) -> None:
        """One event."""
        actions = (
            (self._schedule, 30),
            (self._work, 30),
            (self._deliver, 30),
            (self._submit, 12),
            (self._pass_time, 4),
            (self._abort, 2),
            (self._cancel, 1),
            (self._stop, 1),
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
                self._work(replica, failing_rate=0)
                self._deliver(replica)
            self.now += 0.01
            self._take(self.scheduler.tick(self.now))
            self.scheduler.check_invariants()
            if not self.streams and not any(
                link.plans or link.results for link in self.links.values()
            ):
                break
        assert not self.streams, f"never ended: {list(self.streams)}"
        for view in self.scheduler.replicas():
            assert view.num_free_blocks == view.num_blocks, "blocks are lost"
            assert view.num_free_host_blocks == view.num_host_blocks, "host blocks are lost"
        assert self.scheduler.num_waiting == self.scheduler.num_running == 0
        assert not list(self.scheduler.live_requests())

    # -- clients ------------------------------------------------------------------------------

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(NUM_TOKEN_IDS) for _ in range(count))

    def _submit(self) -> None:
        rng = self.rng
        prompt = self._tokens(rng.randint(1, 14))
        if rng.random() < 0.6:
            prompt = rng.choice(self._prefixes) + prompt * (rng.random() < 0.8)
        self._num_requests += 1
        num_sequences = rng.choice((1, 1, 1, 2, 3))
        beam = None
        if rng.random() < 0.2:
            beam = BeamParams(
                width=max(2, num_sequences),
                length_penalty=rng.choice((-1.0, 0.0, 1.0)),
                early_stopping=rng.choice(list(EarlyStopping)),
                num_return=num_sequences,
            )
        constraint = None
        if beam is None and rng.random() < 0.25:
            constraint = SimConstraint(rng.randrange(1000))
        num_logprobs, num_scored = wanted(self._num_requests, is_beam=beam is not None)
        request = NewRequest(
            request_id=RequestId(f"r{self._num_requests}"),
            prompt_token_ids=prompt,
            sampling=SamplingParams(seed=rng.randrange(4), num_logprobs=num_logprobs),
            max_tokens=rng.choice((1, 2, BLOCK_SIZE, BLOCK_SIZE + 1, 20, 30)),
            eos_token_ids=frozenset(self._tokens(rng.choice((0, 0, 1, 3)))),
            stop_token_ids=frozenset(self._tokens(rng.choice((0, 0, 3)))),
            num_sequences=num_sequences,
            beam=beam,
            constraint=constraint,
            num_prompt_logprobs=num_scored,
            priority=rng.choice((0, 0, 0, 1, -1)),
            queue_timeout_s=rng.choice((None, None, 3.0)),
            deadline_s=rng.choice((None, None, 4.0)),
            tenant=rng.choice(("default", "default", "heavy")),
            cache_salt=rng.choice((b"", b"", b"x")),
            bypass_prefix_cache=rng.random() < 0.1,
        )
        try:
            self.scheduler.submit(request, self.now)
        except (Unavailable, InvalidArgument, ResourceExhausted, DeadlineExceeded) as error:
            self._count(type(error).__name__)
            return
        self._scores.add(request)
        if beam is not None:
            self._count("beam")
            self._searches[request.request_id] = request
        self.streams[request.request_id] = [
            Stream(*expected) for expected in answers_of(request, BLOCK_SIZE)
        ]

    def _abort(self) -> None:
        if self.streams:
            request_id = self.rng.choice(list(self.streams))
            del self.streams[request_id]
            self.scheduler.abort(request_id)
            self._count("abort")

    def _cancel(self) -> None:
        """The operator ends a request: each of its streams that is open hears of it."""
        if not self.streams:
            return
        request_id = self.rng.choice(list(self.streams))
        ends = {end.sequence_index: end for end in self.scheduler.cancel(request_id)}
        for index, stream in enumerate(self.streams.pop(request_id)):
            assert (index in ends) == stream.is_open
            if stream.is_open:
                assert ends[index].num_output_tokens == len(stream.received)
        self._count("cancel")

    def _stop(self) -> None:
        """A stop string is found in some stream's text."""
        for request_id, streams in self.streams.items():
            for index, stream in enumerate(streams):
                if stream.is_open and stream.received:
                    end = self.scheduler.finish_sequence(request_id, index)
                    assert end is not None and end.num_output_tokens == len(stream.received)
                    self._close(request_id, stream)
                    self._count("stop")
                    return

    def _close(self, request_id: RequestId, stream: Stream) -> None:
        assert stream.is_open, "a sequence ended twice"
        stream.is_open = False
        if not any(other.is_open for other in self.streams[request_id]):
            if request_id in self._searches:
                got = [(stream.received, stream.reason) for stream in self.streams[request_id]]
                assert is_beam_answer(self._searches[request_id], got, BLOCK_SIZE, NUM_BLOCKS)
            del self.streams[request_id]

    def _take(self, events: list[Event]) -> None:
        for event in events:
            self._count(type(event).__name__)
            self._scores.take(event, self.streams)
            if isinstance(event, TokensStep):
                assert len(set(event.sequences)) == len(event.sequences) == len(event.token_ids)
                for ref, token in zip(event.sequences, event.token_ids, strict=True):
                    stream = self.streams[ref.request_id][ref.sequence_index]
                    assert stream.is_open, "a token after the end"
                    stream.received.append(token)
                    at = len(stream.received)
                    assert stream.received[-1] == stream.expected[at - 1], (ref, at)
            elif isinstance(event, TokensAppended):
                self._take_answer(event)
            elif isinstance(event, SequenceFinished):
                self._check_end(event)
            elif isinstance(event, RequestFailed):
                self._count(event.kind.value)
                del self.streams[event.request_id]
            else:
                assert isinstance(event, RequestStarted | RequestRecovered | PromptScored)
                assert event.request_id in self.streams

    def _take_answer(self, event: TokensAppended) -> None:
        """The whole answer of a beam search comes at once."""
        stream = self.streams[event.request_id][event.sequence_index]
        assert stream.is_open and not stream.received
        stream.received = list(event.token_ids)

    def _check_end(self, event: SequenceFinished) -> None:
        stream = self.streams[event.request_id][event.sequence_index]
        self._count(event.reason.name)
        if event.request_id in self._searches:
            stream.expected, stream.reason = stream.received, event.reason
        elif event.reason is FinishReason.CONTEXT_LIMIT:
            is_cut = len(stream.received) < len(stream.expected)
            assert is_cut or stream.reason is not FinishReason.MAX_TOKENS
        else:
            assert (stream.received, event.reason) == (stream.expected, stream.reason), event
        is_hidden = event.reason in (FinishReason.EOS, FinishReason.STOP_TOKEN)
        assert event.num_output_tokens == len(stream.received) + is_hidden
        assert (event.stop_token_id is not None) == is_hidden
        self._close(event.request_id, stream)

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
                self._count(op.kind.name)
        self._take(events)

    def _work(self, replica: ReplicaId | None = None, failing_rate: float = 0.003) -> None:
        replica = self._pick() if replica is None else replica
        if replica is None or not self.links[replica].plans:
            return
        link = self.links[replica]
        plan = link.plans.popleft()
        handles = [*plan.decode_handles, *plan.chunk_handles]
        failing = frozenset(h for h in handles if self.rng.random() < failing_rate)
        result = link.worker.apply(plan, failing)
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
            self._take(self.scheduler.apply_result(replica, result, self.now))
        if link.is_draining and self.scheduler.is_drained(replica):
            self._count("drained")
            del self.links[replica]
            self._take(self.scheduler.replica_lost(replica))

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
        self._take(self.scheduler.replica_joined(replica, capacity))

    def _lose(self) -> None:
        replica = self._pick()
        if replica is not None:
            del self.links[replica]
            self._take(self.scheduler.replica_lost(replica))
            self._count("lost")

    def _drain(self) -> None:
        replica = self._pick()
        if replica is not None:
            self.links[replica].is_draining = True
            self._take(self.scheduler.drain_replica(replica))

    def _reset(self) -> None:
        """A plan frame is lost: the results before it arrive, those after it never come."""
        replica = self._pick()
        if replica is None or not self.links[replica].plans:
            return
        link = self.links[replica]
        while link.results:
            link.ledger.answered()
            result = link.results.popleft()
            self._take(self.scheduler.apply_result(replica, result, self.now))
        link.plans.clear()
        link.ledger.void()
        self.scheduler.reset_replica(replica, link.worker.step)
        self._count("reset")

    def _flush(self) -> None:
        self.scheduler.flush_prefix_cache()

    def _pass_time(self) -> None:
        self.now += self.rng.choice((0.1, 1.0, 4.0))
        due_s = self.scheduler.next_tick()
        events = self.scheduler.tick(self.now)
        assert bool(events) == (due_s is not None and due_s <= self.now)
        after_s = self.scheduler.next_tick()
        assert after_s is None or after_s > self.now, "tick left something undone"
        self._take(events)

    def _count(self, name: str) -> None:
        self.tally[name] = self.tally.get(name, 0) + 1


__all__ = ["FailureKind", "Simulator"]
