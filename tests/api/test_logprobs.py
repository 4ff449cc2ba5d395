"""Log-probabilities as a client reads them: each with its token, once, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from protos.quire.inference.v1 import inference_pb2
from protos.quire.worker.v1 import worker_pb2
from scheduler_svc import logprob_messages
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.messages import PromptScored
from scheduler_svc.text.tokenizer import TextModel
from shared.logprobs import Logprobs
from shared.model_spec import ModelSpec
from tests.api.fake_worker import continuation, joined, letter_after
from tests.api.serving import Answer, answer, opened, request, serving
from tests.api.test_streams import ID, finish, new_stream
from tests.api.tiny_model import EOS
from tests.told import told_of

Response = inference_pb2.ResponseOptions
Sampling = inference_pb2.SamplingParams
BOTH = Response(num_logprobs=2, num_prompt_logprobs=3)
NUM_TOKENS = 12


def as_told(parts: Sequence[inference_pb2.Logprobs]) -> tuple[list[float | int], ...]:
    """All flat lists, those of later parts after those of earlier ones."""
    names = ("log_probs", "ranks", "top_token_ids", "top_log_probs")
    return tuple([value for part in parts for value in getattr(part, name)] for name in names)


def expected(token_ids: Sequence[int], places: range, num_top: int) -> tuple[list[object], ...]:
    told = told_of(token_ids, places, num_top)
    return tuple(map(list, (told.log_probs, told.ranks, told.top_token_ids, told.top_log_probs)))


def assert_told(got: Answer, prompt: Sequence[int], index: int = 0) -> None:
    """Everything that BOTH asks for of one sequence."""
    own = [response for response in got.responses if response.sequence_index == index]
    deltas = [response.delta for response in own if response.HasField("delta")]
    tokens = [*prompt, *(token for delta in deltas for token in delta.token_ids)]
    for delta in deltas:
        assert len(delta.logprobs.log_probs) == len(delta.token_ids)
    places = range(len(prompt), len(tokens))
    assert as_told([delta.logprobs for delta in deltas]) == expected(tokens, places, 2)
    parts = [r.prompt_logprobs for r in own if r.HasField("prompt_logprobs")]
    if index:
        assert not parts, "sequence 0 gives them"
        return
    offset = 1
    for part in parts:
        assert part.offset == offset, "a place is lost or given twice"
        assert list(part.token_ids) == list(prompt[offset : offset + len(part.token_ids)])
        offset += len(part.token_ids)
    assert offset == len(prompt)
    told = as_told([part.logprobs for part in parts])
    assert told == expected(prompt, range(1, len(prompt)), 3)


async def test_each_token_of_output_and_prompt_is_told(
    spec: ModelSpec, text_model: TextModel
) -> None:
    """In chunks of 8 tokens, and again with the prompt cached, beside one that asks for nothing.

    FIELD-FAILURES part 1: prompt_logprobs on a cache hit are short or wrong."""
    prompt = b"forty tokens of a prompt, more or less.."
    core = SchedulerConfig(max_num_batched_tokens=8)
    async with serving(spec, text_model, core=core) as served, joined(served.worker()):
        await served.wait_status(1)
        for _ in range(2):
            plain, told = await asyncio.gather(
                answer(served, request(prompt.decode())),
                answer(served, request(prompt.decode(), max_tokens=NUM_TOKENS, response=BOTH)),
            )
            assert not any(delta.HasField("logprobs") for delta in plain.deltas)
            assert_told(told, prompt)
            assert told.token_ids == continuation(prompt, NUM_TOKENS, letter_after)
            assert told.started.num_cached_tokens == 0
        assert plain.started.num_cached_tokens == 32, "it has left a prefix, and takes none"


async def test_choices_tell_their_tokens_and_the_first_tells_the_prompt(
    spec: ModelSpec, text_model: TextModel
) -> None:
    prompt = b"a prompt of thirty-two tokens..."
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        sampling = Sampling(n=3)
        got = await answer(served, request(prompt.decode(), sampling=sampling, response=BOTH))
    for index in range(3):
        assert_told(got, prompt, index)


async def test_nothing_is_lost_or_told_twice_when_blocks_run_out(
    spec: ModelSpec, text_model: TextModel
) -> None:
    """Six requests of up to 5 blocks of 8 in a pool of 10, their prompts in chunks."""
    core = SchedulerConfig(max_num_batched_tokens=12)
    prompts = [f"{index}: twenty tokens..".encode() for index in range(6)]
    messages = [request(p.decode(), max_tokens=18, response=BOTH) for p in prompts]
    async with serving(spec, text_model, core=core) as served:
        worker = served.worker(num_blocks=10, block_size=8)
        async with joined(worker):
            await served.wait_status(1)
            answers = await asyncio.gather(*(answer(served, message) for message in messages))
    assert sum(got.finished.timings.num_preemptions for got in answers)
    for got, prompt in zip(answers, prompts, strict=True):
        assert_told(got, prompt)
        assert len(got.token_ids) == 18


async def test_a_lost_worker_loses_and_doubles_nothing_that_is_told(
    spec: ModelSpec, text_model: TextModel
) -> None:
    """Lost while it computes the prompt, and while it decodes."""
    prompt = b"a prompt of six chunks, eight tokens each"
    core = SchedulerConfig(max_num_batched_tokens=8, no_replica_grace_s=10)
    for num_steps in (3, 12):
        async with serving(spec, text_model, core=core) as served:
            first = served.worker(worker_id="first")
            seen: list[Sequence[int]] = []

            def hold_later(token_ids: Sequence[int]) -> bool:
                seen.append(token_ids)  # noqa: B023
                if len(seen) == num_steps:  # noqa: B023
                    first.hold()  # noqa: B023
                return False

            first.fail_when = hold_later
            async with joined(first):
                await served.wait_status(1)
                message = request(prompt.decode(), max_tokens=60, response=BOTH)
                stream = await opened(served, message)
                while len(seen) < num_steps:
                    await asyncio.sleep(0.001)
            async with joined(served.worker(worker_id="second")):
                got = await stream.rest()
        assert "recovered" in got.kinds
        assert_told(got, prompt)
        assert len(got.token_ids) == 60


async def test_the_rule_at_a_stop_holds_for_what_is_told(
    spec: ModelSpec, text_model: TextModel
) -> None:
    """A token that ends the sequence is not told; those of a stop string are, and none after."""
    script = b"one two three"

    def next_token(token_ids: Sequence[int]) -> int:
        at = len(token_ids) - 3
        return script[at] if at < len(script) else EOS

    async with serving(spec, text_model) as served:
        worker = served.worker(next_token=next_token)
        async with joined(worker):
            await served.wait_status(1)
            ended = await answer(served, request("abc", max_tokens=50, response=BOTH))
            stopped = await answer(served, request("abc", stop=("two",), response=BOTH))
    assert bytes(ended.token_ids) == script
    assert ended.finished.usage.num_output_tokens == len(script) + 1
    assert_told(ended, b"abc")
    assert bytes(stopped.token_ids) == b"one two" and stopped.text == "one "
    assert_told(stopped, b"abc")


async def test_a_worker_that_tells_what_was_not_asked_is_dropped(
    spec: ModelSpec, text_model: TextModel
) -> None:
    """Too few, for another sequence, of a wrong number, or impossible ones."""
    lies: dict[str, Callable[[worker_pb2.LogprobRows], object]] = {
        "none at all": lambda told: told.Clear(),
        "another sequence": lambda told: told.handles.__setitem__(0, 9),
        "too few likeliest": lambda told: (
            told.num_tops.__setitem__(0, 1),
            told.top_token_ids.pop(),
            told.top_log_probs.pop(),
        ),
        "above zero": lambda told: told.log_probs.__setitem__(0, 0.5),
        "not a number": lambda told: told.top_log_probs.__setitem__(0, float("nan")),
        "no rank": lambda told: told.ranks.__setitem__(0, 0),
        "beyond the vocabulary": lambda told: told.top_token_ids.__setitem__(0, 257),
        "a rank beyond it": lambda told: told.ranks.__setitem__(0, 258),
        "missing place": lambda told: told.log_probs.pop(),
    }
    for name, lie in lies.items():
        async with serving(spec, text_model) as served:
            liar = served.worker(worker_id="liar")
            send = liar.send

            async def lying(message: worker_pb2.WorkerMessage) -> None:
                for told in (message.step_result.logprobs, message.step_result.prompt_logprobs):
                    if told.handles:
                        lie(told)  # noqa: B023
                await send(message)  # noqa: B023

            liar.send = lying  # type: ignore[method-assign]
            async with joined(liar, served.worker(worker_id="honest")):
                await served.wait_status(1)
                texts = [f"{number}?" for number in range(4)]
                calls = [answer(served, request(text, response=BOTH)) for text in texts]
                for text, got in zip(texts, await asyncio.gather(*calls), strict=True):
                    assert_told(got, text.encode())
                members = served.server.engine.registry.members()
                assert [member.worker_id for member in members] == ["honest"], name


async def test_messages_stay_far_below_the_limit(text_model: TextModel) -> None:
    """FIELD-FAILURES part 2: messages over 4 MiB. A long prompt at once, and a slow reader."""
    stream = new_stream(text_model)
    prompt = [number % 256 for number in range(10_000)]
    told = told_of(prompt, range(1, 2), 32)
    entries = 32 * (len(prompt) - 1)
    scored = Logprobs([-1.5] * 9999, [200_000] * 9999, 32, [49_000] * entries, [-2.5] * entries)
    messages = list(logprob_messages.prompt_messages(1, prompt, scored))
    assert [token for m in messages for token in m.prompt_logprobs.token_ids] == prompt[1:]
    assert max(message.ByteSize() for message in messages) < 1 << 20
    stream.deliver(PromptScored(ID, 1, told), 1.0)
    for _ in range(5000):
        stream.append(0, 97, 1.0, told)
    finish(stream, 5000)
    merged = [await stream.next_message() for _ in range(3)]
    assert [message and message.WhichOneof("event") for message in merged] == [
        "prompt_logprobs",
        "delta",
        "delta",
    ]
    for message in merged[1:]:
        assert message is not None and message.ByteSize() < 2 << 20
        assert len(message.delta.logprobs.ranks) == len(message.delta.token_ids)
