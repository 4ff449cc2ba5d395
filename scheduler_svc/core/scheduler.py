"""The scheduler: events in, instructions out.

It owns every decision of the service and does nothing itself: no clock, no chance, no I/O. Each
method is one event; it changes state at once and gives what follows from it, as events for the
clients' streams or as a plan for a replica. A method that raises has changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from scheduler_svc.core.admission import check_new_request
from scheduler_svc.core.beam_results import apply_candidates
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.counters import Counters
from scheduler_svc.core.deadlines import Deadlines, why_late
from scheduler_svc.core.endings import Endings, take_off
from scheduler_svc.core.invariants import check_scheduler
from scheduler_svc.core.logprobs import score_prompts
from scheduler_svc.core.messages import (
    Event,
    FailureKind,
    FinishReason,
    NewRequest,
    ReplicaCapacity,
    RequestRecovered,
    RequestStarted,
    SequenceFinished,
    TokensStep,
)
from scheduler_svc.core.placement import may_take, usable
from scheduler_svc.core.planner import StepPlanner
from scheduler_svc.core.policy import make_policy
from scheduler_svc.core.prefix_index import BlockHasher
from scheduler_svc.core.replica import MAX_PLANS_IN_FLIGHT, Replica
from scheduler_svc.core.request import Request, Sequence, make_request
from scheduler_svc.core.results import apply_tokens, check_result, take_failures
from scheduler_svc.core.states import SequenceState
from scheduler_svc.core.story import Stories, Story
from scheduler_svc.core.stranded import Stranded
from scheduler_svc.core.views import ReplicaView, RequestView, view_replica, view_request
from scheduler_svc.core.waiting_queue import WaitingQueue
from shared.errors import AlreadyExists
from shared.ids import ReplicaId, RequestId
from shared.plan import StepPlan, StepResult


class Scheduler:
    """Requests, replicas, and what goes where. Times are seconds of the caller's clock."""

    def __init__(self, config: SchedulerConfig, hash_key: bytes) -> None:
        """`hash_key` has 1 to 64 secret random bytes, drawn anew at each start."""
        self.counters = Counters()
        self._config = config
        self._policy = make_policy(
            config.policy, ageing_s=config.priority_ageing_s, weights=config.tenant_weights
        )
        self._hasher = BlockHasher(hash_key)
        self._requests: dict[RequestId, Request] = {}
        self._replicas: dict[ReplicaId, Replica] = {}
        self._waiting = WaitingQueue(self._policy)
        self._deadlines = Deadlines()
        self._num_arrivals = 0
        self._stories = Stories(config.max_story_events, config.max_finished_stories)
        self._endings = Endings(
            self._requests, self._replicas, self._waiting, self._policy, self._stories
        )
        self._stranded = Stranded(self._replicas, self._waiting, self._endings, config)

    # -- requests -----------------------------------------------------------------------------

    def submit(self, request: NewRequest, now: float) -> None:
        """A new request waits.

        Raises AlreadyExists for an id in use, Unavailable without a replica that takes requests,
        InvalidArgument for what no replica could ever run, ResourceExhausted beyond a queue limit,
        DeadlineExceeded for what can't start in time.
        """
        self._stories.now = now
        if request.request_id in self._requests:
            raise AlreadyExists(f"a request with id {request.request_id!r} is live")
        check_new_request(request, self._usable(), self._waiting, self._config)
        number = self._num_arrivals + 1
        keys = [
            self._policy.order_key(request.priority, now, number, index)
            for index in range(max(request.num_sequences, request.num_beams))
        ]
        entry = make_request(request, now, number, keys)
        self._deadlines.check(entry, self._usable(), self._waiting, now)
        self._num_arrivals = number
        self._requests[entry.id] = entry
        self._waiting.add_request(entry)
        self._deadlines.add(entry, self._usable())
        self._stories.begin(entry, self._describe(entry))

    def abort(self, request_id: RequestId) -> None:
        """Nothing more comes for this request; an unknown id is ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._stories.tell(request, "aborted: nobody waits for it any more")
            self._endings.end_request(request)

    def finish_sequence(
        self, request_id: RequestId, sequence_index: int
    ) -> SequenceFinished | None:
        """The caller found the end of a sequence in its text; gives the sequence's end. What has
        ended or is unknown gives None; a beam search has no text before its end."""
        request = self._requests.get(request_id)
        if request is None or not 0 <= sequence_index < len(request.sequences):
            return None
        return self._endings.finish_early(
            request.sequences[sequence_index], FinishReason.STOP_STRING
        )

    def cancel(self, request_id: RequestId) -> list[SequenceFinished]:
        """The operator ends a request; gives the ends of those of its sequences that lived."""
        request = self._requests.get(request_id)
        heard = request.sequences[: request.new.num_sequences] if request else []
        ends = [self._endings.finish_early(seq, FinishReason.CANCELLED) for seq in heard]
        self.abort(request_id)  # a beam search has more sequences than its client hears of
        return [end for end in ends if end is not None]

    # -- replicas -----------------------------------------------------------------------------

    def replica_joined(self, replica: ReplicaId, capacity: ReplicaCapacity) -> list[Event]:
        """A replica is ready; its last step is 0 and its caches are empty."""
        assert replica not in self._replicas, f"replica {replica} is a member already"
        self._replicas[replica] = Replica(replica, capacity, self._config, self._hasher)
        return self._stranded.replicas_changed(self._stories.now)

    def replica_lost(self, replica: ReplicaId) -> list[Event]:
        """A replica is gone: what ran there waits again with the tokens it has. A request that
        has run on too many lost replicas fails instead."""
        lost = self._replicas.pop(replica)
        ran = {seq.request.id for seq in lost.table}
        touched = {seq.request.id: seq.request for seq in (*lost.table, *lost.swapped)}
        for seq in (*lost.table, *lost.swapped):
            self._return_to_waiting(lost, seq)
        events: list[Event] = []
        for request in sorted(touched.values(), key=lambda request: request.arrival_number):
            request.num_losses += request.id in ran
            if request.num_losses >= self._config.max_replica_losses:
                message = f"it ran on {request.num_losses} workers that were lost"
                events.append(
                    self._endings.fail(request, FailureKind.REPLICA_LOST_TOO_OFTEN, message)
                )
            else:
                self.counters.recoveries += 1
                self._stories.tell(request, f"replica {replica} was lost: it waits to go on")
                events.append(RequestRecovered(request.id))
        return events + self._stranded.replicas_changed(self._stories.now)

    def drain_replica(self, replica: ReplicaId) -> list[Event]:
        """A replica is to leave: it starts nothing new, and what it has goes to replicas that can
        hold it; the rest ends there."""
        draining = self._replicas[replica]
        draining.is_draining = True
        for seq in [*draining.table, *draining.swapped]:
            num_tokens = len(seq.token_ids)
            if seq.is_running:
                num_tokens = int(draining.table.num_tokens[seq.row])
            if any(other.can_ever_hold(seq.request.new, num_tokens) for other in self._usable()):
                self._stories.note(seq, f"leaves replica {replica}, which drains, and waits")
                self._return_to_waiting(draining, seq)
        return self._stranded.replicas_changed(self._stories.now)

    def is_drained(self, replica: ReplicaId) -> bool:
        """Whether a draining replica has nothing left to do and to take back."""
        draining = self._replicas[replica]
        return (
            draining.is_draining
            and draining.is_idle
            and not any(may_take(draining, seq, self._replicas.values()) for seq in self._waiting)
        )

    def reset_replica(self, replica: ReplicaId, at_step: int) -> None:
        """The worker is at `at_step` and did not apply the plans after it: they are void, and
        what runs there waits again. The next plan gives everything whole, on that base."""
        for seq in self._replicas[replica].void(at_step):
            text = f"replica {replica} stands at step {at_step} and starts over: it waits"
            self._stories.note(seq, text)
            self._waiting.add(seq)

    # -- steps --------------------------------------------------------------------------------

    def schedule(self, replica: ReplicaId, now: float) -> tuple[StepPlan | None, list[Event]]:
        """The next plan for a replica; None when there is nothing to do or as many are in flight
        as may be."""
        self._stories.now = now
        target = self._replicas[replica]
        if len(target.in_flight) >= (MAX_PLANS_IN_FLIGHT if self._config.run_ahead else 1):
            return None, []
        planner = StepPlanner(
            target,
            list(self._replicas.values()),
            self._waiting,
            self._config,
            self.counters,
            self._stories,
        )
        plan = planner.plan()
        for seq, num_cached_tokens in planner.started:
            self._deadlines.note_start(seq.num_prompt_tokens, num_cached_tokens)
        return plan, [
            RequestStarted(seq.request.id, replica, num_cached_tokens, now)
            for seq, num_cached_tokens in planner.started
        ]

    def apply_result(self, replica: ReplicaId, result: StepResult, now: float) -> list[Event]:
        """A plan is back. Raises ProtocolError, with nothing changed, when the result does not
        answer the oldest plan in flight completely."""
        self._stories.now = now
        source = self._replicas[replica]
        record, token_ids = check_result(source, result)
        events: list[Event] = []
        if result.failures:
            for seq, message in take_failures(source, record, result):
                if seq.state is not SequenceState.FINISHED:
                    kind = FailureKind.SEQUENCE_FAILED
                    events.append(self._endings.fail(seq.request, kind, message))
        source.in_flight.popleft()  # whoever leaves until here is noted as left while it ran
        if record.prompt_places:
            events += score_prompts(source, record, result)
        outcome = apply_tokens(source, record, result, token_ids)
        if outcome.refs:
            events.append(TokensStep(outcome.refs, outcome.token_ids, outcome.logprobs))
        events.extend(self._endings.finish(ending) for ending in outcome.endings)
        for seq, message in outcome.broken:
            if seq.state is not SequenceState.FINISHED:
                kind = FailureKind.SEQUENCE_FAILED
                events.append(self._endings.fail(seq.request, kind, message))
        if record.candidate_rows:
            for request, answers in apply_candidates(source, record, result, self._waiting):
                self._stories.tell(request, "finished its beam search")
                self._endings.end_request(request)
                events += answers
        source.settle(record)
        if record.work is not None:
            source.cost.learn(record.work, result.execute_s)
        return events

    # -- time ---------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Event]:
        """What is due by time alone: queue timeouts, and the end of the grace without a replica."""
        self._stories.now = now
        events: list[Event] = []
        if self._deadlines.is_due(now):
            while (request := self._deadlines.pop_due(self._usable(), now)) is not None:
                events.append(self._endings.fail(request, *why_late(request, now)))
        return events + self._stranded.tick(now)

    def next_tick(self) -> float | None:
        """When tick has something to do; None while that is nothing."""
        due_s, grace_end_s = self._deadlines.next(), self._stranded.grace_end()
        if due_s is None or grace_end_s is None:
            return grace_end_s if due_s is None else due_s
        return min(due_s, grace_end_s)

    # -- views --------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Sequences that wait."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that run."""
        return sum(replica.num_running for replica in self._replicas.values())

    @property
    def num_swapped(self) -> int:
        """Sequences in host pools."""
        return sum(len(replica.swapped) for replica in self._replicas.values())

    def replicas(self) -> list[ReplicaView]:
        """All replicas, in order of joining."""
        return [view_replica(replica) for replica in self._replicas.values()]

    def live_requests(self) -> Iterator[RequestView]:
        """Requests that have not ended, in order of arrival; the scheduler must not change while
        the iterator is in use."""
        return (view_request(request, self._replicas) for request in self._requests.values())

    def story(self, request_id: RequestId) -> Story | None:
        """What happened to a request that lives or ended not long ago; None for others."""
        return self._stories.find(request_id)

    def flush_prefix_cache(self) -> int:
        """Forget all cached prefixes; gives how many blocks were cached."""
        return sum(replica.kv.index.clear() for replica in self._replicas.values())

    def check_invariants(self) -> None:
        """Full check of the state; raises AssertionError. For tests and idle times."""
        check_scheduler(self._requests, self._replicas, self._waiting)

    # -- moves --------------------------------------------------------------------------------

    def _return_to_waiting(self, replica: Replica, seq: Sequence) -> None:
        take_off(replica, seq, SequenceState.WAITING)
        self._waiting.add(seq)

    def _describe(self, request: Request) -> str:
        new = request.new
        num_before = self._waiting.num_before(request.sequences[0])
        return (
            f"submitted by {new.tenant}: {request.num_prompt_tokens} prompt tokens, up to "
            f"{new.max_tokens} more, {new.num_sequences} choice(s), priority {new.priority}; "
            f"{num_before} wait before it"
        )

    # -- replicas that take new requests ------------------------------------------------------

    def _usable(self) -> list[Replica]:
        return usable(self._replicas.values())
