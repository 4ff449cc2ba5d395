"""Drives a Scheduler with simulated workers, step by step, and keeps what clients would see."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace

from scheduler_svc.core.config import SchedulerConfig
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
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.views import ReplicaView
from shared.ids import ReplicaId, RequestId
from shared.plan import StepPlan, StepResult
from shared.sampling import BeamParams, SamplingParams
from tests.sim.model import NUM_TOKEN_IDS, answers_of
from tests.sim.worker import SimWorker

BLOCK_SIZE = 16
R1, R2 = ReplicaId(1), ReplicaId(2)


def make_request(
    name: str,
    prompt: int | Sequence[int],
    max_tokens: int = 8,
    *,
    num_sequences: int = 1,
    priority: int = 0,
    eos: Sequence[int] = (),
    stop: Sequence[int] = (),
    salt: bytes = b"",
    queue_timeout_s: float | None = None,
    deadline_s: float | None = None,
    tenant: str = "default",
    bypass_prefix_cache: bool = False,
    beam: BeamParams | None = None,
) -> NewRequest:
    """A request; a prompt given as a number is so many tokens that depend on the name."""
    if isinstance(prompt, int):
        start = sum(name.encode())
        prompt = [(start + 7 * position) % 50 for position in range(prompt)]
    return NewRequest(
        request_id=RequestId(name),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(seed=3),
        max_tokens=max_tokens,
        eos_token_ids=frozenset(eos),
        stop_token_ids=frozenset(stop),
        num_sequences=num_sequences if beam is None else beam.num_return,
        beam=beam,
        priority=priority,
        queue_timeout_s=queue_timeout_s,
        deadline_s=deadline_s,
        tenant=tenant,
        cache_salt=salt,
        bypass_prefix_cache=bypass_prefix_cache,
    )


class Driver:
    """A scheduler with workers, and all its events sorted by what they say."""

    def __init__(self, config: SchedulerConfig | None = None) -> None:
        config = replace(config or SchedulerConfig(), vocab_size=NUM_TOKEN_IDS)
        self.scheduler = Scheduler(config, b"test key")
        self.now = 0.0
        self.workers: dict[ReplicaId, SimWorker] = {}
        self.plans: dict[ReplicaId, deque[StepPlan]] = defaultdict(deque)
        self.history: list[StepPlan] = []
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.ends: dict[tuple[str, int], SequenceFinished] = {}
        self.started: dict[str, RequestStarted] = {}
        self.failed: dict[str, FailureKind] = {}
        self.recovered: list[str] = []
        self.scored: dict[str, list[PromptScored]] = defaultdict(list)
        self.peak_blocks = 0

    def join(
        self,
        replica: ReplicaId = R1,
        *,
        num_blocks: int = 64,
        num_host_blocks: int = 0,
        block_size: int = BLOCK_SIZE,
        max_num_batched_tokens: int = 512,
        max_num_seqs: int = 64,
        copy_bytes_per_s: float = 0.0,
        prefill_tokens_per_s: float = 0.0,
    ) -> None:
        """A replica with an empty worker becomes a member."""
        self.workers[replica] = SimWorker(num_blocks, num_host_blocks, block_size)
        capacity = ReplicaCapacity(
            num_blocks,
            num_host_blocks,
            block_size,
            max_num_batched_tokens,
            max_num_seqs,
            block_bytes=1000,
            copy_bytes_per_s=copy_bytes_per_s,
            prefill_tokens_per_s=prefill_tokens_per_s,
        )
        self.take(self.scheduler.replica_joined(replica, capacity))

    def submit(self, request: NewRequest) -> None:
        self.scheduler.submit(request, self.now)
        self.scheduler.check_invariants()

    def schedule(self, replica: ReplicaId = R1) -> StepPlan | None:
        """Ask for a plan and send it."""
        plan, events = self.scheduler.schedule(replica, self.now)
        self.take(events)
        if plan is not None:
            self.plans[replica].append(plan)
            self.history.append(plan)
        view = self.view(replica)
        self.peak_blocks = max(self.peak_blocks, view.num_blocks - view.num_free_blocks)
        return plan

    def work(
        self,
        replica: ReplicaId = R1,
        failing: Sequence[int] = (),
        poisoned: Sequence[int] = (),
    ) -> StepResult:
        """The worker runs its oldest plan."""
        plan = self.plans[replica].popleft()
        return self.workers[replica].apply(plan, frozenset(failing), frozenset(poisoned))

    def apply(self, result: StepResult, replica: ReplicaId = R1) -> None:
        self.take(self.scheduler.apply_result(replica, result, self.now))

    def step(
        self,
        replica: ReplicaId = R1,
        failing: Sequence[int] = (),
        poisoned: Sequence[int] = (),
    ) -> None:
        """One plan, run and answered, with nothing else in flight."""
        assert self.schedule(replica) is not None, "nothing to do"
        self.apply(self.work(replica, failing, poisoned), replica)

    def run(self, max_rounds: int = 3000) -> None:
        """Keep two plans in flight on each replica until all is done."""
        for _ in range(max_rounds):
            for replica in list(self.workers):
                while len(self.plans[replica]) < 2 and self.schedule(replica) is not None:
                    pass
            busy = [replica for replica in self.workers if self.plans[replica]]
            for replica in busy:
                self.apply(self.work(replica), replica)
            if not busy:
                break
        assert not list(self.scheduler.live_requests()), "requests never ended"
        self.check_idle()

    def lose(self, replica: ReplicaId) -> None:
        del self.workers[replica]
        self.plans[replica].clear()
        self.take(self.scheduler.replica_lost(replica))

    def take(self, events: list[Event]) -> None:
        """Sort events; the invariants hold after each call."""
        self.scheduler.check_invariants()
        for event in events:
            if isinstance(event, TokensStep):
                for ref, token in zip(event.sequences, event.token_ids, strict=True):
                    key = (ref.request_id, ref.sequence_index)
                    assert key not in self.ends, "a token after the end"
                    self.tokens[key].append(token)
            elif isinstance(event, TokensAppended):
                self.tokens[event.request_id, event.sequence_index] += event.token_ids
            elif isinstance(event, SequenceFinished):
                assert (event.request_id, event.sequence_index) not in self.ends
                self.ends[event.request_id, event.sequence_index] = event
            elif isinstance(event, RequestStarted):
                assert event.request_id not in self.started
                self.started[event.request_id] = event
            elif isinstance(event, PromptScored):
                self.scored[event.request_id].append(event)
            elif isinstance(event, RequestFailed):
                self.failed[event.request_id] = event.kind
            else:
                assert isinstance(event, RequestRecovered)
                self.recovered.append(event.request_id)

    def forget(self) -> None:
        """What clients saw so far counts no more; their ids may come again."""
        self.tokens.clear()
        self.ends.clear()
        self.started.clear()

    def view(self, replica: ReplicaId = R1) -> ReplicaView:
        return next(view for view in self.scheduler.replicas() if view.replica == replica)

    def reason(self, name: str, index: int = 0) -> FinishReason:
        return self.ends[name, index].reason

    def check_idle(self) -> None:
        """Queues are empty and all blocks are free."""
        assert self.scheduler.num_waiting == 0
        for view in self.scheduler.replicas():
            assert (view.num_running, view.num_swapped, view.num_plans_in_flight) == (0, 0, 0)
            assert view.num_free_blocks == view.num_blocks
            assert view.num_free_host_blocks == view.num_host_blocks

    def check_answer(self, request: NewRequest, block_size: int = BLOCK_SIZE) -> None:
        """Every choice or beam of `request` got the model's own answer."""
        for index, (expected, reason) in enumerate(answers_of(request, block_size)):
            key = (str(request.request_id), index)
            assert self.tokens[key] == expected, key
            assert self.ends[key].reason is reason
