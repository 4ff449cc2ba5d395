"""What a client reads of a stream that runs to its end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from protos.quire.inference.v1 import inference_pb2
from scheduler_svc.text.tokenizer import TextModel
from shared.model_spec import ModelSpec
from tests.api.fake_worker import continuation, joined, letter_after
from tests.api.serving import answer, request, serving
from tests.api.tiny_model import CONTEXT_LENGTH, EOS

REASON = inference_pb2.FinishReason


def letters(prompt: str, num_tokens: int) -> list[int]:
    return continuation(prompt.encode(), num_tokens, letter_after)


async def test_a_stream_is_started_deltas_finished(spec: ModelSpec, text_model: TextModel) -> None:
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        got = await answer(
            served,
            request("hello", sampling=inference_pb2.SamplingParams(seed=7, top_p=0.5)),
        )
    assert got.kinds == ["started", "delta", "finished"]
    assert got.token_ids == letters("hello", 8)
    assert got.text == bytes(letters("hello", 8)).decode()
    assert got.started.model == spec.name
    assert got.started.request_id
    assert got.started.sampling.seed == 7
    assert got.started.sampling.top_p == 0.5
    assert got.started.sampling.HasField("temperature")
    assert (got.started.num_prompt_tokens, got.started.max_tokens) == (5, 8)
    assert got.finished.reason == REASON.FINISH_REASON_MAX_TOKENS
    assert got.finished.usage.num_output_tokens == 8
    timings = got.finished.timings
    assert 0 <= timings.queue_s <= timings.first_token_s <= timings.total_s


async def test_a_seed_is_drawn_and_told_when_there_is_none(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        seeds = {(await answer(served, request())).started.sampling.seed for _ in range(3)}
    assert len(seeds) == 3


async def test_text_ids_and_chat_are_the_same_prompt(
    spec: ModelSpec, text_model: TextModel
) -> None:
    turn = inference_pb2.ChatMessage(role="user", content="hi")
    rendered = "[user] hi\n[assistant] "
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        by_chat = await answer(served, request(chat=inference_pb2.ChatPrompt(messages=[turn])))
        by_text = await answer(served, request(rendered))
        by_ids = await answer(
            served, request(token_ids=inference_pb2.TokenIds(ids=rendered.encode()))
        )
    assert by_chat.token_ids == by_text.token_ids == by_ids.token_ids == letters(rendered, 8)


async def test_a_repeated_prompt_reports_cached_tokens(
    spec: ModelSpec, text_model: TextModel
) -> None:
    """FIELD-FAILURES part 4: the same cache salt hits, another misses."""
    prompt = "x" * 40
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        first = await answer(served, request(prompt, cache_salt="a"))
        again = await answer(served, request(prompt, cache_salt="a"))
        other = await answer(served, request(prompt, cache_salt="b"))
        bypass = await answer(served, request(prompt, cache_salt="a", bypass_prefix_cache=True))
    assert bypass.started.num_cached_tokens == 0
    assert first.started.num_cached_tokens == other.started.num_cached_tokens == 0
    assert again.started.num_cached_tokens == again.finished.usage.num_cached_tokens == 32
    assert first.token_ids == again.token_ids == other.token_ids


@pytest.mark.parametrize("length", [1, 3])
async def test_a_stop_string_ends_the_text_before_it_and_keeps_its_ids(
    spec: ModelSpec, text_model: TextModel, length: int
) -> None:
    """FIELD-FAILURES part 2: a stop string over several tokens does not leak its start."""
    text = bytes(letters("stop here", 40)).decode()
    stop = text[10 : 10 + length]
    end = text.index(stop) + length
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        got = await answer(served, request("stop here", max_tokens=100, stop=(stop,)))
        await served.wait_idle()
    assert got.text == text[: end - length]
    assert bytes(got.token_ids).decode() == text[:end]
    assert got.finished.reason == REASON.FINISH_REASON_STOP_STRING
    assert got.finished.stop_string == stop
    assert got.finished.usage.num_output_tokens == end


async def test_a_near_miss_of_a_stop_string_is_delivered_whole(
    spec: ModelSpec, text_model: TextModel
) -> None:
    """FIELD-FAILURES part 2: the text held for a stop string is flushed at the end."""
    text = bytes(letters("miss", 8)).decode()
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        got = await answer(served, request("miss", stop=(text[-3:] + "?",)))
    assert got.text == text
    assert got.finished.reason == REASON.FINISH_REASON_MAX_TOKENS


async def test_a_character_over_several_tokens_comes_whole(
    spec: ModelSpec, text_model: TextModel
) -> None:
    """FIELD-FAILURES part 2: a character split over tokens shows no U+FFFD."""
    output = "né€😀.".encode()
    async with (
        serving(spec, text_model) as served,
        joined(served.worker(next_token=lambda ids: output[(len(ids) - 3) % len(output)])),
    ):
        await served.wait_status(1)
        got = await answer(served, request("abc", max_tokens=len(output)))
    assert got.text == output.decode()
    assert all("\ufffd" not in delta.text for delta in got.deltas)


async def test_the_end_of_sequence_is_counted_and_not_delivered(
    spec: ModelSpec, text_model: TextModel
) -> None:
    def ends_after_two(token_ids: Sequence[int]) -> int:
        return EOS if len(token_ids) == 4 else 97

    stops = inference_pb2.StoppingParams
    async with (
        serving(spec, text_model) as served,
        joined(served.worker(next_token=ends_after_two)),
    ):
        await served.wait_status(1)
        ended = await answer(served, request("ab"))
        stopped = await answer(
            served, request("ab", stopping=stops(max_tokens=8, stop_token_ids=[97]))
        )
        ignored = await answer(served, request("ab", stopping=stops(max_tokens=5, ignore_eos=True)))
    assert (ended.token_ids, ended.text) == ([97, 97], "aa")
    assert ended.finished.reason == REASON.FINISH_REASON_EOS
    assert ended.finished.token_id == EOS
    assert ended.finished.usage.num_output_tokens == 3
    assert stopped.token_ids == []
    assert stopped.finished.reason == REASON.FINISH_REASON_STOP_TOKEN
    assert stopped.finished.token_id == 97
    assert ignored.token_ids == [97, 97, EOS, 97, 97]
    assert ignored.text == "aaaa"


@pytest.mark.parametrize("max_tokens", [None, 1000])
async def test_the_context_bounds_the_answer(
    spec: ModelSpec, text_model: TextModel, max_tokens: int | None
) -> None:
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        got = await answer(served, request("c" * (CONTEXT_LENGTH - 3), max_tokens=max_tokens))
    assert got.started.max_tokens == len(got.token_ids) == 3
    assert got.finished.reason == REASON.FINISH_REASON_CONTEXT_LIMIT
