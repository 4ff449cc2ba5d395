"""ModelService: what is served."""

from __future__ import annotations

import grpc

from protos.quire.inference.v1 import inference_pb2, inference_pb2_grpc
from scheduler_svc.admission import Admission
from shared.model_spec import ModelSpec


class ModelServicer(inference_pb2_grpc.ModelServiceServicer):
    """Describes the one model of this server."""

    def __init__(self, admission: Admission, spec: ModelSpec, *, has_chat_template: bool) -> None:
        self._admission = admission
        self._model = inference_pb2.Model(
            name=spec.name,
            architecture=spec.architecture,
            context_length=spec.context_length,
            vocab_size=spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
            has_chat_template=has_chat_template,
            fingerprint=spec.fingerprint,
        )

    async def ListModels(  # noqa: N802
        self, _request: inference_pb2.ListModelsRequest, _context: grpc.aio.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        """The served models."""
        return inference_pb2.ListModelsResponse(models=[self._model])

    async def GetModel(  # noqa: N802
        self, request: inference_pb2.GetModelRequest, _context: grpc.aio.ServicerContext
    ) -> inference_pb2.GetModelResponse:
        """One model; NotFound when it is not served."""
        self._admission.check_model(request.name)
        return inference_pb2.GetModelResponse(model=self._model)
