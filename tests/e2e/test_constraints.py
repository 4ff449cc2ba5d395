"""Structured output of the real model: always JSON of its schema, and the same whatever happens."""

from __future__ import annotations

import json

import jsonschema

from protos.quire.inference.v1 import inference_pb2
from tests.e2e.cluster import Answer, Cluster, eventually
from tests.schemas import SCHEMAS

COMPLETE = (inference_pb2.FINISH_REASON_EOS, inference_pb2.FINISH_REASON_CONSTRAINT_COMPLETE)


def guided(name: str) -> inference_pb2.GenerateRequest:
    """Half of them greedy, half drawn, with penalties and log-probabilities."""
    schema = json.dumps(SCHEMAS[name])
    drawn = inference_pb2.SamplingParams(
        temperature=1.0, top_p=0.95, seed=len(name), repetition_penalty=1.1, frequency_penalty=0.2
    )
    return inference_pb2.GenerateRequest(
        text=f"An example of a {name} as JSON:\n",
        sampling=drawn if len(name) % 2 else inference_pb2.SamplingParams(temperature=0),
        stopping=inference_pb2.StoppingParams(max_tokens=96),
        response=inference_pb2.ResponseOptions(num_logprobs=len(name) % 2),
        json_schema=schema,
    )


def check(name: str, got: Answer) -> None:
    assert got.finished is not None and got.finished.reason in COMPLETE, (name, got.text)
    jsonschema.Draft202012Validator(
        SCHEMAS[name], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    ).validate(json.loads(got.text))


def test_fifty_schemas_at_once_and_some_alone(plain: Cluster) -> None:
    names = list(SCHEMAS)
    answers = plain.generate_all([guided(name) for name in names], at_once=len(names))
    for name, got in zip(names, answers, strict=True):
        check(name, got)
    for name in ("person", "points", "pattern", "unicode enum"):
        alone = plain.generate(guided(name))
        assert alone.token_ids == answers[names.index(name)].token_ids
    eventually(plain.is_idle, 5.0, "idle")


def test_a_killed_worker_changes_no_token(two_workers: Cluster) -> None:
    names = ["person", "book", "points", "uuid"]
    requests = [guided(name) for name in names]
    undisturbed = two_workers.generate_all(requests, at_once=len(names))
    with two_workers.running(requests) as answers:
        eventually(lambda: all(got.token_ids for got in answers), 40.0, "first tokens")
        two_workers.workers[0].kill()
    for name, got, expected in zip(names, answers, undisturbed, strict=True):
        assert got.token_ids == expected.token_ids
        check(name, got)
    assert sum(got.num_recoveries for got in answers) > 0
