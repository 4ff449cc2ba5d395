"""A stream's buffer by itself: merged, bounded, in order."""

from __future__ import annotations

from scheduler_svc.admission import AdmittedRequest
from scheduler_svc.core.messages import (
    FinishReason,
    NewRequest,
    RequestRecovered,
    RequestStarted,
    SequenceFinished,
)
from scheduler_svc.streams import MAX_DELTA_TOKENS, RequestStream
from scheduler_svc.text.tokenizer import TextModel
from scheduler_svc.write_pacer import WritePacer
from shared.errors import Unavailable
from shared.ids import ReplicaId, RequestId
from shared.sampling import SamplingParams

ID = RequestId("r")


def new_stream(
    text_model: TextModel, *, num_sequences: int = 1, pacer: WritePacer | None = None
) -> RequestStream:
    request = NewRequest(ID, (1, 2), SamplingParams(), 10_000, num_sequences=num_sequences)
    return RequestStream(
        AdmittedRequest(request, ID, (), is_bounded_by_context=False),
        model_name="tiny",
        new_text=lambda: text_model.stream((1, 2), ()),
        stop_sequence=lambda _: None,
        pacer=pacer or WritePacer(),
        arrival_s=0.0,
    )


def deliver_tokens(stream: RequestStream, num_tokens: int, index: int = 0) -> None:
    for _ in range(num_tokens):
        stream.append(index, 97, 1.0)


def finish(stream: RequestStream, num_output_tokens: int, index: int = 0) -> None:
    event = SequenceFinished(ID, index, FinishReason.MAX_TOKENS, None, num_output_tokens, 0)
    stream.deliver(event, 2.0)


async def test_deltas_that_nobody_took_become_one(text_model: TextModel) -> None:
    """FIELD-FAILURES part 2: a slow reader; memory stays flat."""
    stream = new_stream(text_model)
    stream.deliver(RequestStarted(ID, ReplicaId(1), 0, 0.5), 0.5)
    deliver_tokens(stream, 1000)
    finish(stream, 1000)
    messages = []
    while (message := await stream.next_message()) is not None:
        messages.append(message)
    assert [message.WhichOneof("event") for message in messages] == ["started", "delta", "finished"]
    assert messages[1].delta.text == "a" * 1000
    assert messages[2].finished.timings.queue_s == 0.5
    assert messages[2].finished.timings.first_token_s == 1.0
    assert messages[2].finished.timings.total_s == 2.0


async def test_a_merged_delta_stays_far_below_the_message_limit(text_model: TextModel) -> None:
    stream = new_stream(text_model)
    deliver_tokens(stream, 2 * MAX_DELTA_TOKENS + 1)
    sizes = [len((await stream.next_message()).delta.token_ids) for _ in range(3)]  # type: ignore[union-attr]
    assert sizes == [MAX_DELTA_TOKENS, MAX_DELTA_TOKENS, 1]


async def test_a_recovery_keeps_its_place_between_the_deltas(text_model: TextModel) -> None:
    stream = new_stream(text_model)
    deliver_tokens(stream, 2)
    stream.deliver(RequestRecovered(ID), 1.0)
    deliver_tokens(stream, 3)
    finish(stream, 5)
    messages = [await stream.next_message() for _ in range(4)]
    kinds = [message.WhichOneof("event") for message in messages if message is not None]
    assert kinds == ["delta", "recovered", "delta", "finished"]
    assert messages[1] is not None and messages[1].recovered.offset == 2
    assert messages[2] is not None and messages[2].delta.offset == 2


async def test_sequences_merge_apart_and_the_last_one_ends_the_stream(
    text_model: TextModel,
) -> None:
    stream = new_stream(text_model, num_sequences=2)
    for _ in range(3):
        deliver_tokens(stream, 1, index=0)
        deliver_tokens(stream, 1, index=1)
    finish(stream, 3, index=0)
    assert not stream.is_ended
    finish(stream, 3, index=1)
    assert stream.is_ended
    messages = []
    while (message := await stream.next_message()) is not None:
        messages.append((message.sequence_index, message.WhichOneof("event")))
    assert messages == [(0, "delta"), (1, "delta"), (0, "finished"), (1, "finished")]


async def test_an_error_comes_after_what_was_delivered(text_model: TextModel) -> None:
    stream = new_stream(text_model)
    deliver_tokens(stream, 1)
    stream.fail(Unavailable("gone", 1.0))
    assert await stream.next_message() is not None
    try:
        await stream.next_message()
    except Unavailable as error:
        assert str(error) == "gone"
    else:
        raise AssertionError("the stream ended without its error")
