"""Workers die, hang and come back; streams go on, or end with the right status."""

from __future__ import annotations

import signal
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2

from protos.quire.inference.v1 import inference_pb2
from tests.e2e.cluster import PATIENCE_S, Answer, Cluster, eventually, greedy

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNAVAILABLE_WITHIN_S = 2.0
SLACK_S = 1.5
"""For a busy machine, on top of the product's own bound."""

REQUESTS = [greedy([100 + index, 200, 300 + index], 48) for index in range(8)]


def test_kill_9_of_one_of_two_workers_changes_no_stream(two_workers: Cluster) -> None:
    """Nor that of a client who was away meanwhile and attaches again."""
    undisturbed = two_workers.generate_all(REQUESTS, at_once=8)
    steps = [replica.num_steps for replica in two_workers.state().replicas]
    assert len(steps) == 2 and min(steps) > 0, "the load spreads over both workers"
    away = Answer()
    with two_workers.running(REQUESTS) as answers:
        last_event = leave_after(4, two_workers, away)
        eventually(
            lambda: (
                min(len(answer.token_ids) for answer in answers) >= 4
                and all(replica.num_running for replica in two_workers.state().replicas)
            ),
            PATIENCE_S,
            "all eight streams run, on both workers",
            two_workers.tail,
        )
        two_workers.workers[0].kill()
    attach = inference_pb2.AttachRequest(request_id="away", after_event=last_event)
    for response in two_workers.stub.Attach(attach, timeout=60):
        away.add(response)
    assert (away.token_ids, away.text) == (undisturbed[0].token_ids, undisturbed[0].text)
    assert away.finished is not None
    assert [a.token_ids for a in answers] == [a.token_ids for a in undisturbed]
    assert [a.text for a in answers] == [a.text for a in undisturbed]
    assert sum(answer.num_recoveries for answer in answers) > 0
    assert all(answer.finished is not None for answer in answers)
    assert two_workers.num_ready() == 1 and two_workers.is_idle()


def leave_after(num_tokens: int, cluster: Cluster, answer: Answer) -> int:
    """The first request again, by a client that leaves it running; the last event it has."""
    request = greedy([100, 200, 300], 48)
    request.request_id, request.disconnect = "away", inference_pb2.DISCONNECT_POLICY_DETACH
    call = cluster.stub.Generate(request, timeout=60)
    for response in call:
        answer.add(response)
        if len(answer.token_ids) >= num_tokens:
            call.cancel()
            return response.event_number
    raise AssertionError("it ended before the client could leave")


def test_the_only_worker_dies_and_another_comes(one_worker: Cluster) -> None:
    """FIELD-FAILURES, part 3: running, waiting and just-sent requests end UNAVAILABLE."""
    calls = [one_worker.stub.Generate(greedy([5, index], 2000), timeout=60) for index in range(3)]
    for call in calls:
        assert next(call).HasField("started")
    one_worker.workers[-1].kill()
    killed_s = time.monotonic()
    calls.append(one_worker.stub.Generate(greedy([7], 4), timeout=60))  # just sent
    for call in calls:
        with pytest.raises(grpc.RpcError) as failed:
            for _ in call:
                pass
        assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
    assert time.monotonic() - killed_s < UNAVAILABLE_WITHIN_S + SLACK_S
    assert one_worker.health() == NOT_SERVING
    with pytest.raises(grpc.RpcError) as refused:
        one_worker.generate(greedy([7], 4))
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    one_worker.add_worker()
    one_worker.wait_ready(1)
    assert len(one_worker.generate(greedy([7], 4)).token_ids) == 4
    assert one_worker.health() == SERVING


def test_a_hung_worker_is_noticed_and_taken_back(one_worker: Cluster) -> None:
    """FIELD-FAILURES, part 3: a worker hangs (SIGSTOP)."""
    before = one_worker.generate(REQUESTS[0])
    one_worker.workers[-1].send_signal(signal.SIGSTOP)
    eventually(lambda: one_worker.health() == NOT_SERVING, 1.5 + SLACK_S, "NOT_SERVING")
    one_worker.workers[-1].send_signal(signal.SIGCONT)
    eventually(lambda: one_worker.health() == SERVING, PATIENCE_S, "SERVING", one_worker.tail)
    assert one_worker.generate(REQUESTS[0]).token_ids == before.token_ids


def test_a_worker_outlives_its_scheduler_and_serves_the_next(one_worker: Cluster) -> None:
    """FIELD-FAILURES, part 3: workers started apart reconnect to the scheduler's successor."""
    before = one_worker.generate(REQUESTS[0])
    one_worker.scheduler.kill()
    one_worker.start_scheduler()  # no worker is started
    one_worker.wait_ready(1)
    assert one_worker.generate(REQUESTS[0]).token_ids == before.token_ids
