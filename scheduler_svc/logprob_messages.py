"""Log-probabilities as messages of the public contract."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from protos.quire.inference.v1 import inference_pb2
from shared.logprobs import Logprobs

MAX_PROMPT_PLACES = 2048
"""Places in one PromptLogprobs; keeps a message far below gRPC's 4 MiB."""


def fill_logprobs(message: inference_pb2.Logprobs, parts: Sequence[Logprobs]) -> None:
    """Put those of successive places, all with as many likeliest tokens, into `message`."""
    for part in parts:
        message.log_probs.extend(part.log_probs)
        message.ranks.extend(part.ranks)
        message.top_token_ids.extend(part.top_token_ids)
        message.top_log_probs.extend(part.top_log_probs)


def prompt_messages(
    offset: int, prompt_token_ids: Sequence[int], logprobs: Logprobs
) -> Iterator[inference_pb2.GenerateResponse]:
    """Those of the prompt from place `offset` on."""
    num_top = logprobs.num_top
    for first in range(0, len(logprobs.log_probs), MAX_PROMPT_PLACES):
        end = min(first + MAX_PROMPT_PLACES, len(logprobs.log_probs))
        yield inference_pb2.GenerateResponse(
            prompt_logprobs=inference_pb2.PromptLogprobs(
                offset=offset + first,
                token_ids=prompt_token_ids[offset + first : offset + end],
                logprobs=inference_pb2.Logprobs(
                    log_probs=logprobs.log_probs[first:end],
                    ranks=logprobs.ranks[first:end],
                    top_token_ids=logprobs.top_token_ids[first * num_top : end * num_top],
                    top_log_probs=logprobs.top_log_probs[first * num_top : end * num_top],
                ),
            )
        )
