"""The options that say how tokens are drawn and when an answer ends; shared by the commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from protos.quire.inference.v1 import inference_pb2

MaxTokensOption = Annotated[
    int | None, typer.Option(min=1, help="most tokens to generate; default: what the context holds")
]
TemperatureOption = Annotated[float | None, typer.Option(help="0 takes the most likely token")]
TopKOption = Annotated[int | None, typer.Option(min=0, help="candidates by rank; 0 is all")]
TopPOption = Annotated[float | None, typer.Option(help="candidates by cumulated probability")]
MinPOption = Annotated[float | None, typer.Option(help="candidates by share of the best one's")]
TypicalPOption = Annotated[
    float | None, typer.Option(help="candidates of usual surprise, by cumulated probability")
]
RepetitionOption = Annotated[
    float | None, typer.Option("--repetition-penalty", help="above 1: tokens known come less")
]
PresenceOption = Annotated[
    float | None, typer.Option("--presence-penalty", help="above 0: generated tokens come less")
]
FrequencyOption = Annotated[
    float | None, typer.Option("--frequency-penalty", help="the same for each time they came")
]
BadWordOption = Annotated[
    list[str] | None, typer.Option("--bad-word", help="text that is not to come")
]
SeedOption = Annotated[int | None, typer.Option(min=0, help="same seed, same tokens")]
MinTokensOption = Annotated[
    int | None, typer.Option(min=0, help="tokens generated before anything may end the text")
]
LogprobsOption = Annotated[
    int | None,
    typer.Option(
        "--logprobs", min=0, help="with --json: tell each token's and so many likeliest ones'"
    ),
]
StopOption = Annotated[list[str] | None, typer.Option("--stop", help="string that ends the text")]


def sampling_params(
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int | None,
    n: int | None = None,
    **more: object,
) -> inference_pb2.SamplingParams:
    """What is None stays absent, so that the server's default holds and its checks speak. `more`
    are further fields by name."""
    given: dict[str, Any] = {name: value for name, value in more.items() if value is not None}
    return inference_pb2.SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, n=n, **given
    )


def stopping_params(
    max_tokens: int | None,
    stop: Sequence[str] | None,
    ignore_eos: bool | None = None,
    min_tokens: int | None = None,
) -> inference_pb2.StoppingParams:
    return inference_pb2.StoppingParams(
        max_tokens=max_tokens,
        stop_strings=stop or (),
        ignore_eos=ignore_eos,
        min_tokens=min_tokens or 0,
    )
