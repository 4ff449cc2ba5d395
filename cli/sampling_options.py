"""The options that say how tokens are drawn and when an answer ends; shared by the commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from protos.quire.inference.v1 import inference_pb2

MaxTokensOption = Annotated[
    int | None, typer.Option(min=1, help="most tokens to generate; default: what the context holds")
]
TemperatureOption = Annotated[float | None, typer.Option(help="0 takes the most likely token")]
TopKOption = Annotated[int | None, typer.Option(min=0, help="candidates by rank; 0 is all")]
TopPOption = Annotated[float | None, typer.Option(help="candidates by cumulated probability")]
MinPOption = Annotated[float | None, typer.Option(help="candidates by share of the best one's")]
SeedOption = Annotated[int | None, typer.Option(min=0, help="same seed, same tokens")]
StopOption = Annotated[list[str] | None, typer.Option("--stop", help="string that ends the text")]


def sampling_params(
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int | None,
    n: int | None = None,
) -> inference_pb2.SamplingParams:
    """What is None stays absent, so that the server's default holds and its checks speak."""
    return inference_pb2.SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, n=n
    )


def stopping_params(
    max_tokens: int | None, stop: Sequence[str] | None, ignore_eos: bool | None = None
) -> inference_pb2.StoppingParams:
    return inference_pb2.StoppingParams(
        max_tokens=max_tokens, stop_strings=stop or (), ignore_eos=ignore_eos
    )
