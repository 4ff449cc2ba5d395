"""Log-probabilities of output and prompt are those of transformers, on a cold and a warm cache."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from protos.quire.inference.v1 import inference_pb2
from tests.e2e.cluster import Cluster, greedy
from tests.e2e.reference import Continuation

NUM_TOKENS, NUM_TOP = 8, 4
TOLERANCE = 1e-3

pytestmark = pytest.mark.timeout(400)


def assert_told(told: inference_pb2.Logprobs, token_ids: list[int], expected: torch.Tensor) -> None:
    """`told` is of `token_ids` [n], by the rows of `expected` [n, vocab_size]."""
    tokens = torch.tensor(token_ids)
    log_probs = torch.tensor(list(told.log_probs))
    own = expected.gather(1, tokens[:, None])[:, 0]
    assert (log_probs - own).abs().max() < TOLERANCE
    top_ids = torch.tensor(list(told.top_token_ids)).reshape(-1, NUM_TOP)
    top = torch.tensor(list(told.top_log_probs)).reshape(-1, NUM_TOP)
    assert len(top) == len(token_ids)
    assert (top - expected.topk(NUM_TOP).values).abs().max() < TOLERANCE
    assert (top - expected.gather(1, top_ids)).abs().max() < TOLERANCE
    # A logit as near as the tolerance may stand on either side.
    fewest = (expected > own[:, None] + TOLERANCE).sum(dim=1) + 1
    most = (expected > own[:, None] - TOLERANCE).sum(dim=1)
    ranks = torch.tensor(list(told.ranks))
    assert ((fewest <= ranks) & (ranks <= most)).all()


@torch.inference_mode()
def test_they_equal_transformers(
    plain: Cluster, oracle: LlamaForCausalLM, greedy_continuations: dict[str, Continuation]
) -> None:
    """FIELD-FAILURES part 1: prompt_logprobs on a cache hit are short or wrong."""
    kept = greedy_continuations["fact"]
    prompt, output = kept.prompt_token_ids, kept.token_ids[:NUM_TOKENS]
    logits = oracle(torch.tensor([[*prompt, *output]])).logits[0].double()
    expected = logits.log_softmax(dim=-1).float()
    request = greedy(prompt, NUM_TOKENS)
    plain.generate(request)  # leaves the prompt in the cache
    request.response.num_logprobs = NUM_TOP
    request.response.num_prompt_logprobs = NUM_TOP
    cold = greedy(prompt, NUM_TOKENS, cache_salt="told")
    cold.response.CopyFrom(request.response)
    for message in (cold, request, request):
        told, told_prompt = inference_pb2.Logprobs(), inference_pb2.Logprobs()
        token_ids: list[int] = []
        places: list[int] = []
        for response in plain.stub.Generate(message, timeout=300.0):
            if response.HasField("delta"):
                token_ids += response.delta.token_ids
                told.MergeFrom(response.delta.logprobs)
            elif response.HasField("prompt_logprobs"):
                part = response.prompt_logprobs
                assert part.offset == 1 + len(places)
                places += part.token_ids
                told_prompt.MergeFrom(part.logprobs)
        assert token_ids == output
        assert places == prompt[1:]
        assert_told(told, output, expected[len(prompt) - 1 : -1])
        assert_told(told_prompt, places, expected[: len(prompt) - 1])
