"""TokenizerService: the served model's tokenizer and chat template."""

from __future__ import annotations

import grpc

from protos.quire.inference.v1 import inference_pb2, inference_pb2_grpc
from scheduler_svc.admission import Admission
from scheduler_svc.quotas import TenantQuotas
from scheduler_svc.servicers.auth import TokenBook
from scheduler_svc.text_pool import TextPool


class TokenizerServicer(inference_pb2_grpc.TokenizerServiceServicer):
    """Each call checks the model and its input, counts as a request of its tenant's minute, then
    works on the text pool's threads."""

    def __init__(
        self,
        admission: Admission,
        text_pool: TextPool,
        tokens: TokenBook,
        quotas: TenantQuotas,
    ) -> None:
        self._admission = admission
        self._text_pool = text_pool
        self._tokens = tokens
        self._quotas = quotas

    def _count(self, context: grpc.aio.ServicerContext) -> None:
        self._quotas.count_call(self._tokens.tenant_of_call(context))

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        """Token ids of a text."""
        self._admission.check_model(request.model)
        self._admission.check_text("text", request.text)
        self._count(context)
        add_special_tokens = (
            not request.HasField("add_special_tokens") or request.add_special_tokens
        )
        token_ids = await self._text_pool.encode(
            request.text, add_special_tokens=add_special_tokens
        )
        return inference_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(  # noqa: N802
        self, request: inference_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.DetokenizeResponse:
        """Text of token ids."""
        self._admission.check_model(request.model)
        self._admission.check_num_token_ids("token_ids", request.token_ids)
        self._count(context)
        text = await self._text_pool.decode(
            request.token_ids, skip_special_tokens=request.skip_special_tokens
        )
        return inference_pb2.DetokenizeResponse(text=text)

    async def RenderChat(  # noqa: N802
        self, request: inference_pb2.RenderChatRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.RenderChatResponse:
        """A conversation as text and token ids, as Generate would use them."""
        self._admission.check_model(request.model)
        self._admission.check_chat("chat", request.chat)
        self._count(context)
        turns = [(message.role, message.content) for message in request.chat.messages]
        text, token_ids = await self._text_pool.render_chat(turns)
        return inference_pb2.RenderChatResponse(text=text, token_ids=token_ids)
