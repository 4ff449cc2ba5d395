"""`quire generate`: one prompt, one streamed answer."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from cli.answer import TimedAnswer
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
from cli.errors import EXIT_USAGE, CommandError, from_call_error
from cli.sampling_options import (
    MaxTokensOption,
    MinPOption,
    SeedOption,
    StopOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    sampling_params,
    stopping_params,
)
from cli.several import show_sequences
from protos.quire.inference.v1 import inference_pb2
from quire_client import CallError


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
    seed: SeedOption = None,
    stop: StopOption = None,
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
    text = sys.stdin.read() if prompt == "-" else prompt
    request = inference_pb2.GenerateRequest(
        model=model,
        sampling=sampling_params(temperature, top_k, top_p, min_p, seed, n),
        stopping=stopping_params(max_tokens, stop, ignore_eos or None),
        priority=priority,
    )
    if beams is not None:
        if request.sampling != inference_pb2.SamplingParams():
            raise CommandError("--beams draws nothing: give no option of sampling", EXIT_USAGE)
        request.beam.CopyFrom(inference_pb2.BeamParams(width=beams, num_return=beams))
    set_constraint(
        request,
        json_schema=json_schema,
        json_object=json_object,
        regex=regex,
        choice=choice,
        grammar=grammar,
    )
    if chat:
        request.chat.messages.add(role="user", content=text)
    else:
        request.text = text
    with connect(server_config(server, tls_ca, client_token_file)) as client:
        if beams is not None or (n or 1) > 1:
            show_sequences(client, request, as_json=as_json)
            return
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
    return {
        "request_id": answer.started.request_id,
        "model": answer.started.model,
        "text": answer.text,
        "token_ids": answer.token_ids,
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
