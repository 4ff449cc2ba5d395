"""Requests from plain Python values. What is not given stays absent: the server's defaults hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from protos.quire.inference.v1 import inference_pb2

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""A text, token ids, or a conversation: [{"role": "user", "content": "..."}, ...]."""

_SAMPLING = frozenset(inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
_STOPPING = frozenset(inference_pb2.StoppingParams.DESCRIPTOR.fields_by_name)
_RESPONSE = frozenset(inference_pb2.ResponseOptions.DESCRIPTOR.fields_by_name)


def chat_prompt(messages: Sequence[Mapping[str, str]]) -> inference_pb2.ChatPrompt:
    """A conversation, oldest turn first."""
    return inference_pb2.ChatPrompt(
        messages=[inference_pb2.ChatMessage(**message) for message in messages]
    )


def generate_request(prompt: Prompt, **parameters: Any) -> inference_pb2.GenerateRequest:
    """A request. `parameters` are fields of SamplingParams ("temperature"), of StoppingParams
    ("max_tokens"), of ResponseOptions ("num_logprobs") and of GenerateRequest itself ("priority",
    "json_schema", "beam") by their names in the contract, which gives their ranges and defaults.

    Raises ValueError for a name that none of them has.
    """
    sampling = {name: parameters.pop(name) for name in _SAMPLING & parameters.keys()}
    stopping = {name: parameters.pop(name) for name in _STOPPING & parameters.keys()}
    response = {name: parameters.pop(name) for name in _RESPONSE & parameters.keys()}
    request = inference_pb2.GenerateRequest(**parameters)
    if sampling:
        request.sampling.MergeFrom(inference_pb2.SamplingParams(**sampling))
    if stopping:
        request.stopping.MergeFrom(inference_pb2.StoppingParams(**stopping))
    if response:
        request.response.MergeFrom(inference_pb2.ResponseOptions(**response))
    if isinstance(prompt, str):
        request.text = prompt
    elif any(isinstance(part, Mapping) for part in prompt):
        request.chat.CopyFrom(chat_prompt(prompt))  # type: ignore[arg-type]
    else:
        request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]
    return request


def as_request(
    prompt: Prompt | inference_pb2.GenerateRequest, parameters: Mapping[str, Any]
) -> inference_pb2.GenerateRequest:
    """The request that a client's `generate` was given, in either form."""
    if isinstance(prompt, inference_pb2.GenerateRequest):
        if parameters:
            raise ValueError("a whole request takes no further parameters")
        return prompt
    return generate_request(prompt, **parameters)
