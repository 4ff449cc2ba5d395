"""A server at the process border: speaks the contract, repeats the prompt's words."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc

from protos.quire.admin.v1 import admin_pb2, admin_pb2_grpc
from protos.quire.inference.v1 import inference_pb2, inference_pb2_grpc

MODEL = inference_pb2.Model(
    name="parrot", architecture="llama", context_length=128, vocab_size=1000, has_chat_template=True
)


@dataclass
class FakeServer(
    inference_pb2_grpc.GenerationServiceServicer,
    inference_pb2_grpc.ModelServiceServicer,
    admin_pb2_grpc.AdminServiceServicer,
):
    """Answers max_tokens words. A prompt that starts with "endless" is answered until it is
    cancelled; one with "bad" is refused."""

    address: str = ""
    requests: list[inference_pb2.GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)

    def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        prompt = request.text or request.chat.messages[-1].content
        if "bad" in prompt:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "prompt: it is bad")
        if request.model not in ("", MODEL.name):
            context.abort(grpc.StatusCode.NOT_FOUND, f"no model {request.model!r} is served")
        num_words = len(prompt.split())
        yield inference_pb2.GenerateResponse(
            started=inference_pb2.Started(
                request_id="r1", model=MODEL.name, num_prompt_tokens=num_words, num_cached_tokens=1
            )
        )
        endless = prompt.startswith("endless")
        if endless:
            context.add_callback(self.cancelled.set)
        num_tokens = request.stopping.max_tokens or 3
        for offset in itertools.count() if endless else range(num_tokens):
            if endless:
                if self.cancelled.is_set():
                    return
                time.sleep(0.01)
            delta = inference_pb2.Delta(offset=offset, token_ids=[offset], text=f"w{offset} ")
            if request.response.HasField("num_logprobs"):
                num_top = request.response.num_logprobs
                delta.logprobs.log_probs.append(-float(offset))
                delta.logprobs.ranks.append(1 + offset)
                delta.logprobs.top_token_ids.extend(range(offset, offset + num_top))
                delta.logprobs.top_log_probs.extend([-0.5] * num_top)
            yield inference_pb2.GenerateResponse(delta=delta)
        yield inference_pb2.GenerateResponse(
            finished=inference_pb2.Finished(
                reason=inference_pb2.FINISH_REASON_MAX_TOKENS,
                usage=inference_pb2.Usage(
                    num_prompt_tokens=num_words, num_output_tokens=num_tokens
                ),
            )
        )

    def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(models=[MODEL])

    def GetModel(  # noqa: N802
        self, request: inference_pb2.GetModelRequest, context: grpc.ServicerContext
    ) -> inference_pb2.GetModelResponse:
        if request.name not in ("", MODEL.name):
            context.abort(grpc.StatusCode.NOT_FOUND, f"no model {request.name!r} is served")
        return inference_pb2.GetModelResponse(model=MODEL)

    def ExplainRequest(  # noqa: N802
        self, request: admin_pb2.ExplainRequestRequest, context: grpc.ServicerContext
    ) -> admin_pb2.ExplainRequestResponse:
        if request.request_id != "r1":
            context.abort(grpc.StatusCode.NOT_FOUND, f"no request named {request.request_id!r}")
        return admin_pb2.ExplainRequestResponse(
            is_live=True,
            num_dropped_events=2,
            events=[
                admin_pb2.StoryEvent(after_s=0.25, text="runs"),
                admin_pb2.StoryEvent(after_s=1.5, sequence_index=1, text="preempted"),
            ],
        )

    def GetEngineState(  # noqa: N802
        self, request: admin_pb2.GetEngineStateRequest, context: grpc.ServicerContext
    ) -> admin_pb2.GetEngineStateResponse:
        replica = admin_pb2.ReplicaState(num_steps=10, schedule_s=0.001, execute_s=0.019)
        return admin_pb2.GetEngineStateResponse(replicas=[replica])


@contextmanager
def running_fake_server() -> Iterator[FakeServer]:
    server, fake = grpc.server(futures.ThreadPoolExecutor(8)), FakeServer()
    inference_pb2_grpc.add_GenerationServiceServicer_to_server(fake, server)
    inference_pb2_grpc.add_ModelServiceServicer_to_server(fake, server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(fake, server)
    fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield fake
    finally:
        server.stop(grace=None).wait()
