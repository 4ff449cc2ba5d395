"""A shared prefix is computed once."""

from __future__ import annotations

from protos.quire.inference.v1 import inference_pb2
from tests.e2e.cluster import Cluster, greedy

BLOCK_SIZE = 16
NUM_BLOCKS_OF_600 = 600 // BLOCK_SIZE  # 37 whole blocks, 592 tokens


def _prefix(seed: int, length: int) -> list[int]:
    return [1000 + (seed * 7919 + index * 104_729) % 40_000 for index in range(length)]


def test_a_600_token_prefix_is_computed_once(plain: Cluster) -> None:
    prefix = _prefix(1, 600)
    first, second = (
        plain.generate(greedy([*prefix, *ending], 8)) for ending in ([11, 12, 13], [21, 22, 23])
    )
    assert first.started is not None and first.started.num_cached_tokens == 0
    assert second.started is not None and second.finished is not None
    assert second.started.num_cached_tokens == NUM_BLOCKS_OF_600 * BLOCK_SIZE
    assert second.finished.usage.num_cached_tokens == NUM_BLOCKS_OF_600 * BLOCK_SIZE
    uncached = plain.generate(greedy([*prefix, 21, 22, 23], 8, cache_salt="fresh"))
    assert uncached.token_ids == second.token_ids


def test_a_prompt_of_whole_blocks_leaves_a_token_to_compute(plain: Cluster) -> None:
    """FIELD-FAILURES, part 1: a prompt of exactly k*B tokens, all cached."""
    request = greedy(_prefix(2, 2 * BLOCK_SIZE), 4)
    first, second = plain.generate(request), plain.generate(request)
    assert second.token_ids == first.token_ids
    assert second.started is not None
    assert 0 < second.started.num_cached_tokens < 2 * BLOCK_SIZE


def test_another_salt_misses(plain: Cluster) -> None:
    """FIELD-FAILURES, part 4: same cache salt hits, another misses."""
    prompt = _prefix(3, 100)
    cached = [
        plain.generate(greedy(prompt, 1, cache_salt=salt)).started.num_cached_tokens  # type: ignore[union-attr]
        for salt in ("a", "a", "b", "")
    ]
    assert cached == [0, 96, 0, 0]


def test_the_worked_example_of_the_architecture_page(plain: Cluster) -> None:
    """docs/ARCHITECTURE.md tells these numbers."""

    def ask(question: str) -> tuple[int, int]:
        message = inference_pb2.ChatMessage(role="user", content=question)
        request = inference_pb2.GenerateRequest(
            chat=inference_pb2.ChatPrompt(messages=[message]),
            sampling=inference_pb2.SamplingParams(temperature=0.0),
            stopping=inference_pb2.StoppingParams(max_tokens=8, ignore_eos=True),
            cache_salt="worked example",
        )
        started = plain.generate(request).started
        assert started is not None
        return started.num_prompt_tokens, started.num_cached_tokens

    sky = "Why is the sky blue? Answer in two sentences."
    assert ask(sky) == (41, 0)
    assert ask("Why is the sea salty? Answer in two sentences.") == (41, 16)
    assert ask(sky) == (41, 32)
