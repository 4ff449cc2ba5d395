"""AdminService: shows and steers the engine."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import grpc

from protos.quire.admin.v1 import admin_pb2, admin_pb2_grpc
from scheduler_svc.core.states import SequenceState
from scheduler_svc.core.views import ReplicaView, RequestView
from scheduler_svc.engine import Engine
from scheduler_svc.servicers.generation import GenerationServicer
from shared.errors import NotFound
from shared.ids import RequestId


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Runs on the engine's loop, so that each call sees one moment."""

    def __init__(self, engine: Engine, generation: GenerationServicer) -> None:
        self._engine = engine
        self._generation = generation

    async def GetEngineState(  # noqa: N802
        self, _request: admin_pb2.GetEngineStateRequest, _context: grpc.aio.ServicerContext
    ) -> admin_pb2.GetEngineStateResponse:
        """The counts of the moment."""
        engine = self._engine
        scheduler = engine.scheduler
        counters = {
            **engine.counters,
            **engine.registry.counters,
            **dataclasses.asdict(scheduler.counters),
        }
        return admin_pb2.GetEngineStateResponse(
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            num_swapped=scheduler.num_swapped,
            replicas=[self._replica_state(view) for view in scheduler.replicas()],
            admission_paused=engine.is_paused,
            counters=counters,
            num_streams=self._generation.num_streams,
            num_detachable=self._generation.num_detachable,
            num_tasks=len(asyncio.all_tasks()),
            num_threads=threading.active_count(),
        )

    def _replica_state(self, view: ReplicaView) -> admin_pb2.ReplicaState:
        member = self._engine.registry.member(view.replica)
        assert member is not None, "the core knows members alone"
        times = member.times
        return admin_pb2.ReplicaState(
            worker_id=member.worker_id,
            num_blocks=view.num_blocks,
            num_free_blocks=view.num_free_blocks - view.num_evictable_blocks,
            num_cached_blocks=view.num_evictable_blocks,
            num_running=view.num_running,
            num_steps_in_flight=view.num_plans_in_flight,
            num_steps=times.num_steps,
            schedule_s=times.plan_s.mean + times.apply_s.mean,
            execute_s=times.execute_s.mean,
        )

    async def ListWorkers(  # noqa: N802
        self, _request: admin_pb2.ListWorkersRequest, _context: grpc.aio.ServicerContext
    ) -> admin_pb2.ListWorkersResponse:
        """Each worker."""
        workers = [
            admin_pb2.Worker(
                worker_id=member.worker_id,
                state=admin_pb2.WorkerState.Name(member.state.value),
                device=member.device,
                load_fraction=member.load_fraction,
                epoch=member.epoch,
            )
            for member in self._engine.registry.members()
        ]
        return admin_pb2.ListWorkersResponse(workers=workers)

    async def ListRequests(  # noqa: N802
        self, _request: admin_pb2.ListRequestsRequest, _context: grpc.aio.ServicerContext
    ) -> admin_pb2.ListRequestsResponse:
        """Each live request, in order of arrival."""
        views = self._engine.scheduler.live_requests()
        return admin_pb2.ListRequestsResponse(requests=[_live_request(view) for view in views])

    async def ExplainRequest(  # noqa: N802
        self, request: admin_pb2.ExplainRequestRequest, _context: grpc.aio.ServicerContext
    ) -> admin_pb2.ExplainRequestResponse:
        """What happened to a request; NotFound when it is unknown."""
        story = self._engine.scheduler.story(RequestId(request.request_id))
        if story is None:
            raise NotFound(f"no request named {request.request_id!r} is known")
        return admin_pb2.ExplainRequestResponse(
            is_live=story.is_live,
            num_dropped_events=story.num_dropped,
            events=[
                admin_pb2.StoryEvent(
                    after_s=event.at_s - story.submitted_s,
                    sequence_index=event.sequence_index,
                    text=event.text,
                )
                for event in story.events
            ],
        )

    async def CancelRequest(  # noqa: N802
        self, request: admin_pb2.CancelRequestRequest, _context: grpc.aio.ServicerContext
    ) -> admin_pb2.CancelRequestResponse:
        """Ends a request; NotFound when it does not live."""
        self._engine.cancel(RequestId(request.request_id))
        return admin_pb2.CancelRequestResponse()

    async def DrainWorker(  # noqa: N802
        self, request: admin_pb2.DrainWorkerRequest, _context: grpc.aio.ServicerContext
    ) -> admin_pb2.DrainWorkerResponse:
        """Lets a worker leave; NotFound when there is none of the name."""
        self._engine.drain_worker(request.worker_id)
        return admin_pb2.DrainWorkerResponse()

    async def PauseAdmission(  # noqa: N802
        self, _request: admin_pb2.PauseAdmissionRequest, _context: grpc.aio.ServicerContext
    ) -> admin_pb2.PauseAdmissionResponse:
        """Refuses new requests until ResumeAdmission."""
        self._engine.pause_admission()
        return admin_pb2.PauseAdmissionResponse()

    async def ResumeAdmission(  # noqa: N802
        self, _request: admin_pb2.ResumeAdmissionRequest, _context: grpc.aio.ServicerContext
    ) -> admin_pb2.ResumeAdmissionResponse:
        """Takes new requests again."""
        self._engine.resume_admission()
        return admin_pb2.ResumeAdmissionResponse()

    async def FlushPrefixCache(  # noqa: N802
        self, _request: admin_pb2.FlushPrefixCacheRequest, _context: grpc.aio.ServicerContext
    ) -> admin_pb2.FlushPrefixCacheResponse:
        """Forgets every cached prefix."""
        return admin_pb2.FlushPrefixCacheResponse(num_blocks=self._engine.flush_prefix_cache())


def _live_request(view: RequestView) -> admin_pb2.LiveRequest:
    """A request of several sequences shows its most active one's state, and the sums."""
    states = {sequence.state for sequence in view.sequences}
    order = (SequenceState.RUNNING, SequenceState.SWAPPED, SequenceState.WAITING)
    state = next(state for state in order if state in states)
    return admin_pb2.LiveRequest(
        request_id=view.request_id,
        state=state.name,
        num_prompt_tokens=view.num_prompt_tokens,
        num_output_tokens=sum(sequence.num_output_tokens for sequence in view.sequences),
        num_preemptions=sum(sequence.num_preemptions for sequence in view.sequences),
    )
