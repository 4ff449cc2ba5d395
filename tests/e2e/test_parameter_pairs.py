"""Every pair of parameters, in requests that live through everything: among others, from a warm
cache, preempted in both ways, and moved to another worker. Each gets what it gets alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from protos.quire.inference.v1 import inference_pb2
from quire_client import Aborted, Answer, Client, InvalidArgument, generate_request
from tests.api.tiny_model import EOS, VOCAB_SIZE, write_tiny_model
from tests.e2e.cluster import PATIENCE_S, Cluster, eventually
from tests.e2e.conftest import FLOAT32, PATIENT, started
from tests.e2e.parameter_table import (
    OFF,
    SAMPLED,
    SEARCHED,
    SHARED_PROMPT,
    Pair,
    Row,
    every_pair,
    make_table,
    missing_pairs,
    pairs_of,
    sampled_request,
    searched_request,
)
from tests.worker.tiny_llama import make_llama

pytestmark = pytest.mark.timeout(400)  # thousands of small steps, on a machine that may be busy

SEEDS = (0, 1)
BLOCK_SIZE = 8
WORKER = (
    *(*FLOAT32, "--threads", "1", "--block-size", str(BLOCK_SIZE)),
    *("--host-memory", "0.02"),
)
SCHEDULER = ("--max-num-batched-tokens", "64")
SMALL_POOL = ("--num-blocks", "48")
AMPLE_POOL = ("--num-blocks", "2000")
MAX_ROUNDS = 8


@dataclass(frozen=True)
class Choice:
    """What a client has of one sequence."""

    token_ids: list[int]
    text: str
    logprobs: inference_pb2.Logprobs
    reason: str | None
    stopped_by: int | str | None
    beam_score: float | None
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True)
class Told:
    """What a client has of a whole request, whatever the server did meanwhile."""

    choices: list[Choice]
    prompt_logprobs: inference_pb2.Logprobs


def told_by(answer: Answer) -> Told:
    choices = []
    for _, sequence in sorted(answer.sequences.items()):
        usage = sequence.usage
        assert usage is not None
        choices.append(
            Choice(
                sequence.token_ids,
                sequence.text,
                sequence.logprobs,
                sequence.finish_reason,
                sequence.stopped_by,
                sequence.beam_score,
                usage.num_prompt_tokens,
                usage.num_output_tokens,
            )
        )
    return Told(choices, answer.prompt_logprobs)


def num_preemptions(answer: Answer) -> int:
    ends = [sequence.finished for sequence in answer.sequences.values()]
    return sum(end.timings.num_preemptions for end in ends if end is not None)


@dataclass(frozen=True)
class Asked:
    """The requests with what each gets alone."""

    rows: list[Row]
    """Of the first requests; the others are beam searches."""
    requests: list[inference_pb2.GenerateRequest]
    expected: list[Told]

    def check(self, answers: Sequence[Answer]) -> None:
        for number, (answer, expected) in enumerate(zip(answers, self.expected, strict=True)):
            assert told_by(answer) == expected, self.requests[number]

    def pairs(self, which: Sequence[int]) -> set[Pair]:
        """What the requests of these numbers bring together."""
        return set[Pair]().union(*(pairs_of(self.rows[i]) for i in which if i < len(self.rows)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights over bytes, of a head size that the native kernels take."""
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    llama = make_llama(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    llama.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ample(model: Path) -> Iterator[Cluster]:
    with started(Cluster(model, (*SCHEDULER, *PATIENT), (*WORKER, *AMPLE_POOL))) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def asked(ample: Cluster) -> Asked:
    """Each request alone, with nothing cached."""
    rows = [row for seed in SEEDS for row in make_table(SAMPLED, seed)]
    requests = [sampled_request(row, number) for number, row in enumerate(rows)]
    searches = enumerate(make_table(SEARCHED, SEEDS[0]))
    requests += [searched_request(row, number) for number, row in searches]
    expected = []
    with Client(ample.address) as client:
        for request in requests:
            alone = inference_pb2.GenerateRequest()
            alone.CopyFrom(request)
            alone.bypass_prefix_cache = True
            expected.append(told_by(client.generate(alone).result()))
    return Asked(rows, requests, expected)


def together(cluster: Cluster, requests: Sequence[inference_pb2.GenerateRequest]) -> list[Answer]:
    with Client(cluster.address) as client, ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(lambda request: client.generate(request).result(), requests))
    assert cluster.is_idle()
    return answers


def test_the_table_has_every_pair_and_ends_of_every_kind(asked: Asked) -> None:
    assert not missing_pairs(asked.rows, SAMPLED)
    reasons = Counter(choice.reason for told in asked.expected for choice in told.choices)
    assert set(reasons) == {
        *("EOS", "STOP_TOKEN", "STOP_STRING", "MAX_TOKENS", "CONSTRAINT_COMPLETE")
    }
    assert min(reasons.values()) >= 5, reasons
    for request, told in zip(asked.requests, asked.expected, strict=True):
        wants_prompt = request.response.HasField("num_prompt_logprobs")
        assert bool(told.prompt_logprobs.log_probs) == wants_prompt
        for choice in told.choices:
            num_told = len(choice.token_ids) * request.response.HasField("num_logprobs")
            assert len(choice.logprobs.log_probs) == num_told


def test_together_from_a_cold_and_from_a_warm_cache(ample: Cluster, asked: Asked) -> None:
    for is_warm in (False, True):
        answers = together(ample, asked.requests)
        asked.check(answers)
        for request, answer in zip(asked.requests, answers, strict=True):
            assert answer.started is not None
            if is_warm and not request.response.HasField("num_prompt_logprobs"):
                whole_blocks = (answer.started.num_prompt_tokens - 1) // BLOCK_SIZE
                assert answer.started.num_cached_tokens == whole_blocks * BLOCK_SIZE
    assert ample.state().counters["preemptions"] == 0


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted(model: Path, asked: Asked, mode: str) -> None:
    """FIELD-FAILURES, part 4: a seeded request changes after preemption.

    In rounds, in which those come last that were never preempted, until each pair was."""
    flags = (*SCHEDULER, *PATIENT, "--preemption", mode)
    preempted: set[int] = set()
    with started(Cluster(model, flags, (*WORKER, *SMALL_POOL))) as cluster:
        for _ in range(MAX_ROUNDS):
            for number, request in enumerate(asked.requests):
                request.priority = 1 if number in preempted else 0
            answers = together(cluster, asked.requests)
            asked.check(answers)
            preempted.update(i for i, one in enumerate(answers) if num_preemptions(one))
            if len(preempted) == len(asked.requests):
                break
        counters = cluster.state().counters
    assert asked.pairs(sorted(preempted)) == every_pair(SAMPLED)
    assert len(preempted) == len(asked.requests)
    assert (counters["swaps_out"] > 0) == (mode == "swap")


def interrupted(
    cluster: Cluster, asked: Asked, moved: set[int], *, has_second: bool = False
) -> list[Answer]:
    """All answers, in whose midst the newest worker is killed: when each stream has begun whose
    number is not in `moved`. Unless there `has_second`, another one comes then."""
    with Client(cluster.address) as client, ThreadPoolExecutor(len(asked.requests)) as pool:
        running = [client.generate(request) for request in asked.requests]
        results = [pool.submit(one.result) for one in running]

        def have_begun() -> bool:
            return all(one.answer.started or i in moved for i, one in enumerate(running))

        eventually(have_begun, PATIENCE_S, "the streams have begun", cluster.tail)
        cluster.workers[-1].kill()
        if not has_second:
            cluster.add_worker()
        return [result.result() for result in results]


def test_moved_to_another_worker_in_mid_stream(model: Path, asked: Asked) -> None:
    """FIELD-FAILURES, part 4: a seeded request changes on another replica.

    In rounds, until each request has lost the only worker in one of them; the first ends some
    requests while constraints of others are compiled. Then to a second one, which has requests and
    cached prefixes of its own."""
    flags = (*SCHEDULER, "--no-replica-grace-s", "60")
    moved: set[int] = set()
    with started(Cluster(model, flags, (*WORKER, *AMPLE_POOL))) as cluster:
        for num_lost in range(1, MAX_ROUNDS + 1):
            answers = interrupted(cluster, asked, moved)
            asked.check(answers)
            moved.update(i for i, answer in enumerate(answers) if answer.num_recoveries)
            counters = cluster.state().counters
            assert counters["workers_lost"] >= num_lost
            if len(moved) == len(asked.requests):
                break
        cluster.add_worker()
        cluster.wait_ready(2)
        answers = interrupted(cluster, asked, moved=set(), has_second=True)
        asked.check(answers)
        assert 0 < sum(answer.num_recoveries > 0 for answer in answers) < len(answers)
        assert cluster.is_idle()
    assert asked.pairs(sorted(moved)) == every_pair(SAMPLED)
    assert len(moved) == len(asked.requests)
    assert counters["requests_recovered"] >= len(moved)


BEAM: dict[str, Any] = {"beam": inference_pb2.BeamParams(width=2)}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    *(
        ("stopping.min_tokens", {"min_tokens": 1, **value})
        for name, value in SAMPLED["constraint"].items()
        if name not in OFF
    ),
    *(
        (next(iter(value)), {**BEAM, **value})
        for name, value in SAMPLED["constraint"].items()
        if name not in OFF
    ),
    ("stopping.min_tokens", {"min_tokens": 1, **BEAM}),
    ("stopping.stop_strings", {"stop_strings": ["a"], **BEAM}),
    ("response.num_logprobs", {"num_logprobs": 1, **BEAM}),
    ("response.num_prompt_logprobs", {"num_prompt_logprobs": 1, **BEAM}),
]


@pytest.mark.parametrize(("field", "fields"), REFUSED)
def test_pairs_that_the_contract_has_not(
    ample: Cluster, field: str, fields: dict[str, Any]
) -> None:
    with Client(ample.address) as client, pytest.raises(InvalidArgument) as refused:
        client.generate(generate_request(SHARED_PROMPT, **fields)).result()
    assert [violation.field for violation in refused.value.field_violations] == [field]


def test_lists_that_leave_nothing_of_a_constraint_fail_the_request_alone(ample: Cluster) -> None:
    """What may come is known in the midst of the text alone, so this is ABORTED."""
    lists = ({"allowed_token_ids": [7]}, {"banned_token_ids": [*b"0"]}, {"bad_words": ["0"]})
    with Client(ample.address) as client:
        for fields in lists:
            request = generate_request(SHARED_PROMPT, regex="a0{3}", **fields)
            with pytest.raises(Aborted, match="leave no token to draw"):
                client.generate(request).result()
    assert ample.is_idle()
