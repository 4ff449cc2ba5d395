"""The same request gives the same tokens, and they are those of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from protos.quire.inference.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.cluster import Answer, Cluster, greedy
from tests.e2e.conftest import FLOAT32, PATIENT, started
from tests.e2e.prompts import CHATS, TEXTS
from tests.e2e.reference import (
    NUM_TOKENS,
    Continuation,
    continue_greedily,
    write_model_folder,
)

Continuations = dict[str, Continuation]
FEW = ("one letter", "python", "chinese", "chat turns")
LONG = "two thousand tokens"
BLOCK_SIZE = 16

pytestmark = pytest.mark.timeout(
    400
)  # thousands of tokens in float32, on a machine that may be busy


def _requests(kept: Continuations, names: Sequence[str]) -> list[inference_pb2.GenerateRequest]:
    return [greedy(kept[name].prompt_token_ids, NUM_TOKENS) for name in names]


def _assert_equal(kept: Continuations, names: Sequence[str], answers: Sequence[Answer]) -> None:
    different = {
        name: (answer.token_ids, kept[name].token_ids)
        for name, answer in zip(names, answers, strict=True)
        if answer.token_ids != kept[name].token_ids
    }
    assert not different


def test_the_kept_tokens_are_those_of_transformers(
    oracle: LlamaForCausalLM, greedy_continuations: Continuations
) -> None:
    """A live check of the file that the other tests rest on."""
    for name in ("fact", "chat question"):
        kept = greedy_continuations[name]
        live = continue_greedily(oracle, kept.prompt_token_ids, 12)
        assert live.token_ids == kept.token_ids[:12]


def test_prompts_are_tokenized_as_by_transformers(
    plain: Cluster, greedy_continuations: Continuations
) -> None:
    stub = inference_pb2_grpc.TokenizerServiceStub(plain.channel)
    for name, text in TEXTS.items():
        response = stub.Tokenize(inference_pb2.TokenizeRequest(text=text))
        assert list(response.token_ids) == greedy_continuations[name].prompt_token_ids, name
    for name, messages in CHATS.items():
        chat = inference_pb2.ChatPrompt(
            messages=[inference_pb2.ChatMessage(**message) for message in messages]
        )
        rendered = stub.RenderChat(inference_pb2.RenderChatRequest(chat=chat))
        assert list(rendered.token_ids) == greedy_continuations[name].prompt_token_ids, name


def test_sixteen_at_a_time_and_then_with_a_warm_prefix_cache(
    plain: Cluster, greedy_continuations: Continuations
) -> None:
    names = list(greedy_continuations)
    assert len(names) == 30
    requests = _requests(greedy_continuations, names)
    _assert_equal(greedy_continuations, names, plain.generate_all(requests, at_once=16))
    again = (*names[:15], LONG)
    warm = plain.generate_all(_requests(greedy_continuations, again), at_once=16)
    _assert_equal(greedy_continuations, again, warm)
    for name, answer in zip(again, warm, strict=True):
        # whole blocks of the prompt come from the cache, but at least one token is computed
        cacheable = (len(greedy_continuations[name].prompt_token_ids) - 1) // BLOCK_SIZE
        assert answer.started is not None
        assert answer.started.num_cached_tokens == cacheable * BLOCK_SIZE, name


def test_one_at_a_time(plain: Cluster, greedy_continuations: Continuations) -> None:
    requests = _requests(greedy_continuations, FEW)
    for index, request in enumerate(requests):
        request.cache_salt = f"alone {index}"  # nothing may come from the cache
    answers = plain.generate_all(requests, at_once=1)
    _assert_equal(greedy_continuations, FEW, answers)
    assert all(answer.started.num_cached_tokens == 0 for answer in answers if answer.started)


def test_a_chunk_budget_of_sixteen_tokens(
    model_path: Path, greedy_continuations: Continuations
) -> None:
    budget = ("--max-num-batched-tokens", "16")
    with started(Cluster(model_path, (*budget, *PATIENT), (*FLOAT32, *budget))) as cluster:
        answers = cluster.generate_all(_requests(greedy_continuations, FEW), at_once=len(FEW))
    _assert_equal(greedy_continuations, FEW, answers)


def test_a_pool_so_small_that_requests_are_preempted(
    model_path: Path, greedy_continuations: Continuations
) -> None:
    """28 blocks hold 448 tokens; the 12 answers alone grow to 768."""
    small = sorted(greedy_continuations.items(), key=lambda item: len(item[1].prompt_token_ids))
    names = [name for name, _ in small[:12]]
    flags = (*FLOAT32, "--num-blocks", "28")
    with started(Cluster(model_path, PATIENT, flags)) as cluster:
        requests = _requests(greedy_continuations, names)
        answers = cluster.generate_all(requests, at_once=len(names))
        assert cluster.is_idle()
    _assert_equal(greedy_continuations, names, answers)
    preemptions = [a.finished.timings.num_preemptions for a in answers if a.finished]
    assert sum(preemptions) > 0


def test_safetensors_of_the_same_model(
    oracle: LlamaForCausalLM,
    model_path: Path,
    greedy_continuations: Continuations,
    tmp_path: Path,
) -> None:
    write_model_folder(oracle, model_path, tmp_path / "folder")
    names = list(greedy_continuations)
    with started(Cluster(tmp_path / "folder", PATIENT, FLOAT32)) as cluster:
        stub = inference_pb2_grpc.TokenizerServiceStub(cluster.channel)
        for name, text in TEXTS.items():
            response = stub.Tokenize(inference_pb2.TokenizeRequest(text=text))
            assert list(response.token_ids) == greedy_continuations[name].prompt_token_ids, name
        answers = cluster.generate_all(_requests(greedy_continuations, names), at_once=16)
    _assert_equal(greedy_continuations, names, answers)


def test_a_seeded_draw_does_not_depend_on_its_neighbours(
    plain: Cluster, greedy_continuations: Continuations
) -> None:
    """FIELD-FAILURES, part 4: a seeded request changes with its neighbours."""
    requests = [
        inference_pb2.GenerateRequest(
            text=TEXTS[name],
            sampling=inference_pb2.SamplingParams(temperature=0.9, top_k=50, top_p=0.95, seed=seed),
            stopping=inference_pb2.StoppingParams(max_tokens=32, ignore_eos=True),
        )
        for seed, name in enumerate(("fact", "story", "fact", "python", "chinese", "fact"), 11)
    ]
    together = plain.generate_all(requests, at_once=len(requests))
    alone = plain.generate_all(requests, at_once=1)
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]
    facts = [together[index].token_ids for index in (0, 2, 5)]
    assert len({tuple(tokens) for tokens in facts}) == 3, "another seed draws other tokens"
