"""Several answers to one prompt, choices or beams, shown when all are complete."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from cli.errors import from_rpc_error
from protos.quire.inference.v1 import inference_pb2, inference_pb2_grpc


@dataclass(slots=True)
class _Sequence:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    reason: str = ""
    beam_score: float | None = None

    def add(self, response: inference_pb2.GenerateResponse) -> None:
        if response.HasField("delta"):
            self.text += response.delta.text
            self.token_ids.extend(response.delta.token_ids)
        elif response.HasField("finished"):
            name = inference_pb2.FinishReason.Name(response.finished.reason)
            self.reason = name.removeprefix("FINISH_REASON_")
            if response.finished.HasField("beam_score"):
                self.beam_score = response.finished.beam_score


def show_sequences(
    channel: grpc.Channel,
    request: inference_pb2.GenerateRequest,
    metadata: Sequence[tuple[str, str]],
    *,
    as_json: bool,
) -> None:
    """Prints each sequence under its number, with its score where it has one; or one JSON object.

    Raises CommandError when the call fails.
    """
    sequences: dict[int, _Sequence] = defaultdict(_Sequence)
    stub = inference_pb2_grpc.GenerationServiceStub(channel)
    try:
        for response in stub.Generate(request, metadata=tuple(metadata)):
            sequences[response.sequence_index].add(response)
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
    in_order = [sequences[index] for index in sorted(sequences)]
    if as_json:
        shown = [
            {
                "text": one.text,
                "token_ids": one.token_ids,
                "finish_reason": one.reason,
                "beam_score": one.beam_score,
            }
            for one in in_order
        ]
        print(json.dumps({"sequences": shown}, ensure_ascii=False))
        return
    for index, one in enumerate(in_order):
        score = "" if one.beam_score is None else f", score {one.beam_score:.4f}"
        print(f"[{index}{score}] {one.text}")
