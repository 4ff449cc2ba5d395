"""`quire generate`: one prompt, one streamed answer."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from cli.answer import TimedAnswer
from cli.call_errors import from_call_error
from cli.connection import (
    DEFAULT_SERVER,
    ModelOption,
    ServerOption,
    TlsCaOption,
    TokenFileOption,
    connect,
    server_config,
)
from cli.constraint_options import (
    ChoiceOption,
    GrammarOption,
    JsonObjectOption,
    JsonSchemaOption,
    RegexOption,
    set_constraint,
)
from cli.errors import EXIT_USAGE, CommandError
from cli.sampling_options import (
    BadWordOption,
    FrequencyOption,
    LogprobsOption,
    MaxTokensOption,
    MinPOption,
    MinTokensOption,
    PresenceOption,
    RepetitionOption,
    SeedOption,
    StopOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    TypicalPOption,
    sampling_params,
    stopping_params,
)
from cli.several import show_sequences
from protos.quire.inference.v1 import inference_pb2
from quire_client import CallError, Client


def generate(
    prompt: Annotated[str, typer.Argument(help="the text; - reads it from standard input")],
    server: ServerOption = DEFAULT_SERVER,
    tls_ca: TlsCaOption = None,
    client_token_file: TokenFileOption = None,
    model: ModelOption = "",
    chat: Annotated[
        bool, typer.Option("--chat", help="send the prompt as a user's turn of a conversation")
    ] = False,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    typical_p: TypicalPOption = None,
    repetition_penalty: RepetitionOption = None,
    presence_penalty: PresenceOption = None,
    frequency_penalty: FrequencyOption = None,
    bad_words: BadWordOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    min_tokens: MinTokensOption = None,
    logprobs: LogprobsOption = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="go on after the end of the text")
    ] = False,
    n: Annotated[
        int | None, typer.Option("--n", min=1, help="answers to draw; shown when all are complete")
    ] = None,
    beams: Annotated[
        int | None, typer.Option(min=2, help="search with so many beams instead of drawing")
    ] = None,
    json_schema: JsonSchemaOption = None,
    json_object: JsonObjectOption = False,
    regex: RegexOption = None,
    choice: ChoiceOption = None,
    grammar: GrammarOption = None,
    priority: Annotated[int, typer.Option(help="larger is more important")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="print one JSON object instead of text")
    ] = False,
) -> None:
    """Continue a text, or answer a question with --chat."""
    request = inference_pb2.GenerateRequest(
        model=model,
        sampling=sampling_params(
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            n,
            typical_p=typical_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            bad_words=bad_words,
        ),
        stopping=stopping_params(max_tokens, stop, ignore_eos or None, min_tokens),
        priority=priority,
    )
    if logprobs is not None:
        request.response.num_logprobs = logprobs
    if beams is not None:
        _search_with(request, beams)
    set_constraint(
        request,
        json_schema=json_schema,
        json_object=json_object,
        regex=regex,
        choice=choice,
        grammar=grammar,
    )
    _set_prompt(request, sys.stdin.read() if prompt == "-" else prompt, chat=chat)
    with connect(server_config(server, tls_ca, client_token_file)) as client:
        if beams is not None or (n or 1) > 1:
            show_sequences(client, request, as_json=as_json)
        else:
            _show(client, request, as_json=as_json)


def _set_prompt(request: inference_pb2.GenerateRequest, text: str, *, chat: bool) -> None:
    if chat:
        request.chat.messages.add(role="user", content=text)
    else:
        request.text = text


def _search_with(request: inference_pb2.GenerateRequest, beams: int) -> None:
    if request.sampling != inference_pb2.SamplingParams():
        raise CommandError("--beams draws nothing: give no option of sampling", EXIT_USAGE)
    request.beam.CopyFrom(inference_pb2.BeamParams(width=beams, num_return=beams))


def _show(client: Client, request: inference_pb2.GenerateRequest, *, as_json: bool) -> None:
    """Prints one answer as it comes, or as one JSON object when it is complete."""
    timed = TimedAnswer(client, request)
    try:
        for piece in timed.texts():
            if not as_json:
                print(piece, end="", flush=True)
    except CallError as error:
        if timed.answer.text and not as_json:
            print()
        raise from_call_error(error) from None
    if as_json:
        print(json.dumps(_as_json(timed), ensure_ascii=False))
    else:
        print()
        print(timed.summary(), file=sys.stderr)


def _as_json(timed: TimedAnswer) -> dict[str, object]:
    answer, finished = timed.answer, timed.answer.first.finished
    assert answer.started is not None and finished is not None
    usage, timings = finished.usage, finished.timings
    told = _logprobs_as_json(answer.first.logprobs)
    return {
        "request_id": answer.started.request_id,
        "model": answer.started.model,
        "text": answer.text,
        "token_ids": answer.token_ids,
        **({"logprobs": told} if told else {}),
        "finish_reason": timed.reason,
        "seed": answer.started.sampling.seed,
        "num_prompt_tokens": usage.num_prompt_tokens,
        "num_cached_tokens": usage.num_cached_tokens,
        "num_output_tokens": usage.num_output_tokens,
        "num_preemptions": timings.num_preemptions,
        "queue_s": timings.queue_s,
        "first_token_s": timings.first_token_s,
        "total_s": timings.total_s,
        "tokens_per_s": timed.tokens_per_s,
    }


def _logprobs_as_json(told: inference_pb2.Logprobs) -> list[dict[str, object]]:
    """One object a token; empty when they were not asked for."""
    num_places = len(told.log_probs)
    num_top = len(told.top_token_ids) // max(1, num_places)
    return [
        {
            "log_prob": told.log_probs[place],
            "rank": told.ranks[place],
            "top": [
                {"token_id": told.top_token_ids[entry], "log_prob": told.top_log_probs[entry]}
                for entry in range(place * num_top, (place + 1) * num_top)
            ],
        }
        for place in range(num_places)
    ]
