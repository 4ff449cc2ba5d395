"""Parameters of sampling and stopping: what is refused, what is in force, what workers get."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from protos.quire.inference.v1 import inference_pb2
from scheduler_svc.text.tokenizer import TextModel
from shared.model_files import read_model_spec
from shared.model_spec import ModelSpec
from shared.plan import SequenceStart
from shared.sampling import NO_RULES, TokenRules
from tests.api.fake_worker import joined
from tests.api.serving import Served, answer, error_of, request, serving, violated_field
from tests.api.tiny_model import EOS, VOCAB_SIZE, write_tiny_model

Sampling = inference_pb2.SamplingParams
Stopping = inference_pb2.StoppingParams
Response = inference_pb2.ResponseOptions
Beam = inference_pb2.BeamParams
NAN, INF = float("nan"), float("inf")
EVERY = range(VOCAB_SIZE)

BAD_SAMPLING: list[tuple[str, dict[str, Any]]] = [
    ("typical_p", {"typical_p": 0}),
    ("typical_p", {"typical_p": 1.001}),
    ("typical_p", {"typical_p": NAN}),
    ("repetition_penalty", {"repetition_penalty": 0.09}),
    ("repetition_penalty", {"repetition_penalty": 10.1}),
    ("repetition_penalty", {"repetition_penalty": -1}),
    ("repetition_penalty", {"repetition_penalty": NAN}),
    ("presence_penalty", {"presence_penalty": 2.01}),
    ("presence_penalty", {"presence_penalty": NAN}),
    ("frequency_penalty", {"frequency_penalty": -2.01}),
    ("frequency_penalty", {"frequency_penalty": INF}),
    (f"logit_bias[{VOCAB_SIZE}]", {"logit_bias": {VOCAB_SIZE: 1.0}}),
    ("logit_bias[4294967295]", {"logit_bias": {2**32 - 1: 1.0}}),
    ("logit_bias[3]", {"logit_bias": {3: 100.5}}),
    ("logit_bias[3]", {"logit_bias": {3: NAN}}),
    ("logit_bias[3]", {"logit_bias": {3: -INF}}),
    ("logit_bias", {"logit_bias": {token: 0.0 for token in range(1025)}}),
    ("allowed_token_ids[1]", {"allowed_token_ids": [1, VOCAB_SIZE]}),
    ("allowed_token_ids[0]", {"allowed_token_ids": [2**32 - 1]}),
    ("allowed_token_ids", {"allowed_token_ids": [1] * 8193}),
    ("banned_token_ids[0]", {"banned_token_ids": [VOCAB_SIZE]}),
    ("banned_token_ids", {"banned_token_ids": [1] * 8193}),
    ("allowed_token_ids", {"allowed_token_ids": [1, 2], "banned_token_ids": [2, 1, 3]}),
    ("allowed_token_ids", {"allowed_token_ids": [97], "bad_words": ["xa"]}),
    ("banned_token_ids", {"banned_token_ids": EVERY}),
    ("banned_token_ids", {"banned_token_ids": EVERY[1:], "bad_words": ["\0"]}),
    ("bad_words", {"bad_words": ["x"] * 65}),
    ("bad_words[1]", {"bad_words": ["x", ""]}),
    ("bad_words[0]", {"bad_words": ["é" * 65]}),
]
BAD_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    *((f"sampling.{field}", {"sampling": Sampling(**fields)}) for field, fields in BAD_SAMPLING),
    ("stopping.min_tokens", {"stopping": Stopping(min_tokens=5, max_tokens=4)}),
    ("stopping.min_tokens", {"stopping": Stopping(min_tokens=257)}),
    (
        "sampling.allowed_token_ids",
        {"sampling": Sampling(allowed_token_ids=[EOS]), "stopping": Stopping(min_tokens=1)},
    ),
    ("response.num_logprobs", {"response": Response(num_logprobs=33)}),
    ("response.num_prompt_logprobs", {"response": Response(num_prompt_logprobs=2**32 - 1)}),
    ("response.num_logprobs", {"beam": Beam(width=2), "response": Response(num_logprobs=0)}),
    (
        "response.num_prompt_logprobs",
        {"beam": Beam(width=2), "response": Response(num_prompt_logprobs=1)},
    ),
    ("stopping.min_tokens", {"beam": Beam(width=2), "stopping": Stopping(min_tokens=1)}),
    ("stopping.min_tokens", {"json_object": True, "stopping": Stopping(min_tokens=1)}),
]


async def start_of(served: Served, message: inference_pb2.GenerateRequest) -> SequenceStart:
    """What a worker is told of a request."""
    worker = served.worker()
    async with joined(worker):
        await served.wait_status(1)
        await answer(served, message)
    (start,) = [start for plan in worker.plans for start in plan.starts]
    return start


async def test_each_broken_limit_is_named(spec: ModelSpec, text_model: TextModel) -> None:
    """FIELD-FAILURES part 4: -1, NaN, vocab size and 2^32-1 in logit_bias and lists, huge
    prompt_logprobs."""
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        for field, fields in BAD_REQUESTS:
            error = await error_of(served.generation.Generate(request(**fields)))
            assert violated_field(error) == field, (fields, error)
        assert (await answer(served, request())).kinds == ["started", "delta", "finished"]


async def test_values_on_the_limits_pass_and_are_told_in_started(
    spec: ModelSpec, text_model: TextModel
) -> None:
    sampling = Sampling(
        temperature=0.5,
        top_k=5,
        top_p=0.75,
        min_p=0.25,
        seed=1,
        n=1,
        first_choice=0,
        typical_p=0.5,
        repetition_penalty=10,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={0: -100.0, VOCAB_SIZE - 1: 100.0},
        allowed_token_ids=EVERY[1:],
        banned_token_ids=[7, 8],
        bad_words=["é" * 64] * 64,
    )
    message = request(
        sampling=sampling,
        stopping=Stopping(max_tokens=4, min_tokens=4),
        response=Response(num_logprobs=32, num_prompt_logprobs=32),
    )
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        got = await answer(served, message)
    assert got.started.sampling == sampling
    assert got.kinds == ["started", "prompt_logprobs", "delta", "finished"]


async def test_workers_get_the_rules_and_nothing_where_there_are_none(
    spec: ModelSpec, text_model: TextModel
) -> None:
    sampling = Sampling(
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={9: 1.0, 5: -1.5},
        allowed_token_ids=[12, 11, 12],
        banned_token_ids=[14, 13, 13],
        bad_words=["hi", "x", "hi"],
        typical_p=0.5,
    )
    stopping = Stopping(max_tokens=8, min_tokens=3, stop_token_ids=[40])
    async with serving(spec, text_model) as served:
        start = await start_of(served, request(sampling=sampling, stopping=stopping))
    assert start.sampling.rules == TokenRules(
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        bias_token_ids=(5, 9),
        biases=(-1.5, 1.0),
        allowed_token_ids=(11, 12),
        banned_token_ids=(13, 14),
        bad_words=tuple(tuple(word) for word in (b"hi", b" hi", b"x", b" x")),
        min_tokens=3,
        end_token_ids=(40, EOS),
    )
    assert start.sampling.typical_p == 0.5
    async with serving(spec, text_model) as served:
        start = await start_of(served, request(stopping=Stopping(max_tokens=8, min_tokens=0)))
    assert start.sampling.rules == NO_RULES
    assert (start.sampling.num_logprobs, start.num_prompt_logprobs) == (None, None)


async def test_ignored_ends_are_ordinary_tokens_for_min_tokens_too(
    spec: ModelSpec, text_model: TextModel
) -> None:
    stopping = Stopping(max_tokens=8, min_tokens=3, ignore_eos=True)
    async with serving(spec, text_model) as served:
        start = await start_of(served, request(stopping=stopping))
        assert start.sampling.rules == NO_RULES


def scripted(prompt: str, script: bytes) -> Any:
    """A worker's tokens: the script, byte by byte."""

    def next_token(token_ids: Sequence[int]) -> int:
        return script[(len(token_ids) - len(prompt)) % len(script)]

    return next_token


@pytest.mark.parametrize(
    ("fields", "text", "num_tokens"),
    [
        ({}, "one ", 7),
        ({"include_stop_string": True}, "one two", 7),
        ({"min_tokens": 4}, "one ", 7),
        ({"min_tokens": 5}, "one two one ", 15),
        ({"min_tokens": 5, "include_stop_string": True}, "one two one two", 15),
    ],
)
async def test_a_stop_string_after_min_tokens_ends_the_text_with_or_without_itself(
    spec: ModelSpec, text_model: TextModel, fields: dict[str, Any], text: str, num_tokens: int
) -> None:
    """The text of the first min_tokens tokens is not searched: "two" is seen from its t on."""
    stopping = Stopping(max_tokens=40, stop_strings=["two"], **fields)
    async with serving(spec, text_model) as served:
        worker = served.worker(next_token=scripted("p", b"one two "))
        async with joined(worker):
            await served.wait_status(1)
            got = await answer(served, request("p", stopping=stopping))
    assert got.text == text
    assert len(got.token_ids) == got.finished.usage.num_output_tokens == num_tokens
    assert got.finished.stop_string == "two"


async def test_the_models_own_defaults_hold_where_a_request_says_nothing(
    text_model: TextModel, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    own = {"temperature": 0.5, "top_k": 1000, "top_p": 0.75, "min_p": None, "do_sample": False}
    own |= {"typical_p": 0.875, "repetition_penalty": 1.5, "max_new_tokens": 3}
    (folder / "generation_config.json").write_text(json.dumps(own))
    asked = request(sampling=Sampling(top_p=1.0, seed=3))
    async with serving(read_model_spec(folder), text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        started = (await answer(served, asked)).started
    expected = Sampling(
        temperature=0.5,
        top_k=VOCAB_SIZE,
        top_p=1.0,
        min_p=0.0,
        seed=3,
        n=1,
        first_choice=0,
        typical_p=0.875,
        repetition_penalty=1.5,
        presence_penalty=0.0,
        frequency_penalty=0.0,
    )
    assert started.sampling == expected
    spec = read_model_spec(folder, use_generation_config=False)
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        started = (await answer(served, asked)).started
    assert (started.sampling.temperature, started.sampling.repetition_penalty) == (1.0, 1.0)
