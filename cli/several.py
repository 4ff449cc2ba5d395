"""Several answers to one prompt, choices or beams, shown when all are complete."""

from __future__ import annotations

import json

from cli.call_errors import from_call_error
from protos.quire.inference.v1 import inference_pb2
from quire_client import CallError, Client


def show_sequences(
    client: Client, request: inference_pb2.GenerateRequest, *, as_json: bool
) -> None:
    """Prints each sequence under its number, with its score where it has one; or one JSON object.

    Raises CommandError when the call fails.
    """
    try:
        sequences = client.generate(request).result().sequences
    except CallError as error:
        raise from_call_error(error) from None
    in_order = [sequences[index] for index in sorted(sequences)]
    if as_json:
        shown = [
            {
                "text": one.text,
                "token_ids": one.token_ids,
                "finish_reason": one.finish_reason,
                "beam_score": one.beam_score,
            }
            for one in in_order
        ]
        print(json.dumps({"sequences": shown}, ensure_ascii=False))
        return
    for index, one in enumerate(in_order):
        score = "" if one.beam_score is None else f", score {one.beam_score:.4f}"
        print(f"[{index}{score}] {one.text}")
