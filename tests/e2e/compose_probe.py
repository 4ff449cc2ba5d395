"""Is what docker compose brought up a working Quire? Run after `up` and after each scaling.

CHECK_STEP names the step. At worker=3 the probe scales down to one worker in the middle of its
streams: each must end complete and equal to one that nothing disturbed. Exits with 1 and a sentence
on what is wrong.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.quire.inference.v1 import inference_pb2, inference_pb2_grpc

ADDRESS = f"127.0.0.1:{os.environ.get('QUIRE_PORT', '50051')}"
READY_TIMEOUT_S = 90.0
STREAM_TIMEOUT_S = 120.0
NUM_STREAMS = 6
NUM_TOKENS = 160
QUESTION = "What is the capital of France, and what is it known for?"


class ProbeFailed(Exception):
    """What compose brought up does not do its work."""


@dataclass(slots=True)
class Stream:
    """One whole answer, as it came."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    num_recovered: int = 0


def main(step: str) -> None:
    """The checks of one step; raises ProbeFailed."""
    with grpc.insecure_channel(ADDRESS) as channel:
        wait_until_serving(channel)
        alone = generate(channel)
        if "Paris" not in alone.text:
            raise ProbeFailed(f"a nonsensical answer: {alone.text!r}")
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            streams = [pool.submit(generate, channel) for _ in range(NUM_STREAMS)]
            if step == "worker=3":
                scale_down()
            for stream in streams:
                if stream.result().token_ids != alone.token_ids:
                    raise ProbeFailed(f"a stream differs from the same request alone, at {step}")
        moved = sum(stream.result().num_recovered for stream in streams)
    print(f"probe: {NUM_STREAMS} streams of {len(alone.token_ids)} tokens equal, {moved} moved")


def wait_until_serving(channel: grpc.Channel) -> None:
    """Returns once the health service says SERVING."""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    stub = health_pb2_grpc.HealthStub(channel)
    status = "no answer"
    while time.monotonic() < deadline_s:
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=5, wait_for_ready=True)
        except grpc.RpcError as error:
            status = str(error)
        else:
            status = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
            if reply.status == health_pb2.HealthCheckResponse.SERVING:
                return
        time.sleep(0.5)
    raise ProbeFailed(f"not serving after {READY_TIMEOUT_S:.0f} s: {status}")


def generate(channel: grpc.Channel) -> Stream:
    """One greedy answer to QUESTION; checks the order of its events."""
    request = inference_pb2.GenerateRequest()
    request.chat.messages.add(role="user", content=QUESTION)
    request.sampling.temperature = 0
    request.stopping.max_tokens = NUM_TOKENS
    request.stopping.ignore_eos = True
    stream = Stream()
    finished = None
    stub = inference_pb2_grpc.GenerationServiceStub(channel)
    for response in stub.Generate(request, timeout=STREAM_TIMEOUT_S):
        if finished is not None:
            raise ProbeFailed("an event after the last one")
        match response.WhichOneof("event"):
            case "delta":
                if response.delta.offset != len(stream.token_ids):
                    raise ProbeFailed("a delta begins where none was due: tokens lost or doubled")
                stream.token_ids.extend(response.delta.token_ids)
                stream.text += response.delta.text
            case "recovered":
                stream.num_recovered += 1
            case "finished":
                finished = response.finished
    if finished is None or finished.reason != inference_pb2.FINISH_REASON_MAX_TOKENS:
        raise ProbeFailed(f"a stream ended by {finished}, not by its length")
    if len(stream.token_ids) != NUM_TOKENS:
        raise ProbeFailed(f"{len(stream.token_ids)} tokens came, not {NUM_TOKENS}")
    return stream


def scale_down() -> None:
    """Down to one worker, as an operator would."""
    command = ["docker-compose", "up", "-d", "--no-recreate", "--scale", "worker=1"]
    subprocess.run(command, check=True, timeout=STREAM_TIMEOUT_S)


if __name__ == "__main__":
    try:
        main(os.environ.get("CHECK_STEP", "up"))
    except (ProbeFailed, grpc.RpcError) as error:
        sys.exit(f"probe: {error}")
