"""The tokenizer, the model card, health and reflection."""

from __future__ import annotations

from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos.quire.inference.v1 import inference_pb2
from scheduler_svc.text.tokenizer import TextModel
from shared.model_spec import ModelSpec
from tests.api.fake_worker import joined
from tests.api.serving import NOT_SERVING, SERVING, error_of, serving, violated_field
from tests.api.tiny_model import CONTEXT_LENGTH, EOS, VOCAB_SIZE
from tests.ipv6 import needs_ipv6


async def test_text_becomes_ids_and_ids_text(spec: ModelSpec, text_model: TextModel) -> None:
    async with serving(spec, text_model) as served:
        ids = await served.tokenizer.Tokenize(inference_pb2.TokenizeRequest(text="né"))
        text = await served.tokenizer.Detokenize(
            inference_pb2.DetokenizeRequest(token_ids=[*"né".encode(), EOS])
        )
        plain = await served.tokenizer.Detokenize(
            inference_pb2.DetokenizeRequest(token_ids=[97, EOS], skip_special_tokens=True)
        )
        turn = inference_pb2.ChatMessage(role="user", content="hi")
        chat = await served.tokenizer.RenderChat(
            inference_pb2.RenderChatRequest(chat=inference_pb2.ChatPrompt(messages=[turn]))
        )
    assert list(ids.token_ids) == list("né".encode())
    assert text.text == "né<eos>"
    assert plain.text == "a"
    assert chat.text == "[user] hi\n[assistant] "
    assert list(chat.token_ids) == list(chat.text.encode())


async def test_tokenizer_calls_name_what_is_wrong(spec: ModelSpec, text_model: TextModel) -> None:
    async with serving(spec, text_model) as served:
        beyond = inference_pb2.DetokenizeRequest(token_ids=[VOCAB_SIZE])
        empty = inference_pb2.RenderChatRequest()
        many = inference_pb2.DetokenizeRequest(token_ids=[1] * ((1 << 20) + 1))
        assert violated_field(await error_of(served.tokenizer.Detokenize(many))) == "token_ids"
        large = inference_pb2.TokenizeRequest(text="x" * ((4 << 20) + 1))
        assert violated_field(await error_of(served.tokenizer.Detokenize(beyond))) == "token_ids"
        assert violated_field(await error_of(served.tokenizer.RenderChat(empty))) == "chat.messages"
        turn = inference_pb2.ChatMessage(role="r" * (4 << 20), content="x")
        roles = inference_pb2.RenderChatRequest(chat=inference_pb2.ChatPrompt(messages=[turn]))
        assert violated_field(await error_of(served.tokenizer.RenderChat(roles))) == "chat.messages"
        assert violated_field(await error_of(served.tokenizer.Tokenize(large))) == "text"


async def test_the_model_is_described(spec: ModelSpec, text_model: TextModel) -> None:
    async with serving(spec, text_model) as served:
        listed = await served.models.ListModels(inference_pb2.ListModelsRequest())
        named = await served.models.GetModel(inference_pb2.GetModelRequest(name=spec.name))
    (model,) = listed.models
    assert model == named.model
    assert (model.name, model.architecture, model.vocab_size) == (spec.name, "llama", VOCAB_SIZE)
    assert model.context_length == CONTEXT_LENGTH
    assert list(model.eos_token_ids) == [EOS]
    assert model.has_chat_template
    assert model.fingerprint == spec.fingerprint


async def test_health_follows_the_workers_for_every_service(
    spec: ModelSpec, text_model: TextModel
) -> None:
    services = ["", *(f"quire.inference.v1.{n}Service" for n in ("Generation", "Tokenizer"))]
    async with serving(spec, text_model) as served:
        for service in services:
            check = health_pb2.HealthCheckRequest(service=service)
            assert (await served.health.Check(check)).status == NOT_SERVING
        async with joined(served.worker()):
            await served.wait_status(SERVING)
            for service in services:
                check = health_pb2.HealthCheckRequest(service=service)
                assert (await served.health.Check(check)).status == SERVING


async def test_reflection_gives_the_contract(spec: ModelSpec, text_model: TextModel) -> None:
    async with serving(spec, text_model) as served:
        stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
        question = reflection_pb2.ServerReflectionRequest(
            file_containing_symbol="quire.inference.v1.GenerationService"
        )
        answers = [answer async for answer in stub.ServerReflectionInfo(iter([question]))]
    (found,) = answers
    (file,) = found.file_descriptor_response.file_descriptor_proto
    assert FileDescriptorProto.FromString(file).package == "quire.inference.v1"


@needs_ipv6
async def test_it_listens_on_ipv6_too(spec: ModelSpec, text_model: TextModel) -> None:
    async with serving(spec, text_model, listen="[::1]:0") as served:
        assert served.server.address.startswith("[::1]:")
        assert (await served.models.ListModels(inference_pb2.ListModelsRequest())).models
