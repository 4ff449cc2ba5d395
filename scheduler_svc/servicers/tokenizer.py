"""TokenizerService: the served model's tokenizer and chat template."""

from __future__ import annotations

import grpc

from protos.quire.inference.v1 import inference_pb2, inference_pb2_grpc
from scheduler_svc.admission import Admission
from scheduler_svc.text_pool import TextPool


class TokenizerServicer(inference_pb2_grpc.TokenizerServiceServicer):
    """Each call checks the model and its input, then works on the text pool's threads."""

    def __init__(self, admission: Admission, text_pool: TextPool) -> None:
        self._admission = admission
        self._text_pool = text_pool

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, _context: grpc.aio.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        """Token ids of a text."""
        self._admission.check_model(request.model)
        self._admission.check_text("text", request.text)
        add_special_tokens = (
            not request.HasField("add_special_tokens") or request.add_special_tokens
        )
        token_ids = await self._text_pool.encode(
            request.text, add_special_tokens=add_special_tokens
        )
        return inference_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(  # noqa: N802
        self, request: inference_pb2.DetokenizeRequest, _context: grpc.aio.ServicerContext
    ) -> inference_pb2.DetokenizeResponse:
        """Text of token ids."""
        self._admission.check_model(request.model)
        self._admission.check_num_token_ids("token_ids", request.token_ids)
        text = await self._text_pool.decode(
            request.token_ids, skip_special_tokens=request.skip_special_tokens
        )
        return inference_pb2.DetokenizeResponse(text=text)

    async def RenderChat(  # noqa: N802
        self, request: inference_pb2.RenderChatRequest, _context: grpc.aio.ServicerContext
    ) -> inference_pb2.RenderChatResponse:
        """A conversation as text and token ids, as Generate would use them."""
        self._admission.check_model(request.model)
        self._admission.check_chat("chat", request.chat)
        turns = [(message.role, message.content) for message in request.chat.messages]
        text, token_ids = await self._text_pool.render_chat(turns)
        return inference_pb2.RenderChatResponse(text=text, token_ids=token_ids)
