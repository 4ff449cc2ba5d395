"""When streams write: idle ones at once, flowing ones in turns within the budget."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from scheduler_svc.core.messages import FinishReason, RequestStarted, SequenceFinished
from scheduler_svc.streams import RequestStream
from scheduler_svc.text.tokenizer import TextModel
from scheduler_svc.write_pacer import (
    CPU_BUDGET,
    DEFAULT_COST_S,
    MAX_COST_S,
    MIN_COST_S,
    MIN_MEASURED_MESSAGES,
    WINDOW_S,
    WritePacer,
)
from shared.ids import ReplicaId
from tests.api.test_streams import ID, new_stream


@dataclass
class Clock:
    """Time stands still until it is moved."""

    now: float = 100.0
    cpu_s: float = 0.0

    def pacer(self) -> WritePacer:
        return WritePacer(lambda: self.now, lambda: self.cpu_s)


def flow(pacer: WritePacer, num_streams: int) -> None:
    """So many streams write one message each."""
    for _ in range(num_streams):
        pacer.note_write(pacer.window - 1, 1)


def test_the_pause_grows_with_the_streams_that_flow_and_goes_with_them() -> None:
    clock = Clock()
    pacer = clock.pacer()
    flow(pacer, 200)
    assert pacer.pause_s == pytest.approx(200 * DEFAULT_COST_S / CPU_BUDGET)
    pacer.note_write(pacer.window, 1)  # the same stream again
    assert pacer.pause_s == pytest.approx(200 * DEFAULT_COST_S / CPU_BUDGET)
    clock.now += WINDOW_S
    flow(pacer, 10)  # the window before still counts
    assert pacer.pause_s == pytest.approx(200 * DEFAULT_COST_S / CPU_BUDGET)
    clock.now += WINDOW_S
    flow(pacer, 10)
    assert pacer.pause_s == pytest.approx(10 * DEFAULT_COST_S / CPU_BUDGET)
    clock.now += 10 * WINDOW_S
    flow(pacer, 1)
    assert pacer.pause_s == pytest.approx(DEFAULT_COST_S / CPU_BUDGET)


@pytest.mark.parametrize(
    ("cpu_s", "num_messages", "cost_s"),
    [
        (0.3, 2000, 150e-6),
        (0.001, 2000, MIN_COST_S),
        (2.0, 2000, MAX_COST_S),
        (0.9, MIN_MEASURED_MESSAGES - 1, DEFAULT_COST_S),
    ],
)
def test_a_message_costs_what_was_measured_within_bounds(
    cpu_s: float, num_messages: int, cost_s: float
) -> None:
    clock = Clock()
    pacer = clock.pacer()
    flow(pacer, num_messages)
    clock.cpu_s += cpu_s
    clock.now += WINDOW_S
    flow(pacer, num_messages)
    assert pacer.pause_s == pytest.approx(num_messages * cost_s / CPU_BUDGET)


async def is_written(stream: RequestStream) -> list[str] | None:
    """The texts of the messages that can be had now; None when there is none."""
    texts: list[str] = []
    while True:
        reading = asyncio.ensure_future(stream.next_message())
        await asyncio.sleep(0)
        if not reading.done():
            reading.cancel()
            return texts or None
        message = reading.result()
        if message is None:
            return texts
        texts.append(message.delta.text or message.WhichOneof("event") or "")


async def test_a_stream_waits_for_its_turn_and_an_idle_one_does_not(text_model: TextModel) -> None:
    clock = Clock()
    pacer = clock.pacer()
    flow(pacer, 500)
    stream = new_stream(text_model, pacer=pacer)
    stream.append(0, 97, clock.now)
    assert await is_written(stream) == ["a"]  # it was idle
    stream.append(0, 98, clock.now)
    assert await is_written(stream) is None
    clock.now += pacer.pause_s / 2
    stream.append(0, 99, clock.now)
    assert await is_written(stream) is None
    clock.now += pacer.pause_s
    await asyncio.sleep(1.5 * pacer.pause_s)  # the timer runs by the loop's own clock
    assert await is_written(stream) == ["bc"]
    clock.now += 2 * pacer.pause_s
    stream.append(0, 100, clock.now)
    assert await is_written(stream) == ["d"]


async def test_a_token_that_comes_before_its_start_is_written_needs_no_other(
    text_model: TextModel,
) -> None:
    stream = new_stream(text_model, pacer=Clock().pacer())
    stream.deliver(RequestStarted(ID, ReplicaId(1), 0, 0.5), 0.5)
    stream.append(0, 97, 0.6)
    started = await stream.next_message()
    assert started is not None and started.HasField("started")
    message = await asyncio.wait_for(stream.next_message(), 5.0)
    assert message is not None and message.delta.text == "a"


async def test_an_end_waits_for_no_turn(text_model: TextModel) -> None:
    clock = Clock()
    pacer = clock.pacer()
    flow(pacer, 500)
    stream = new_stream(text_model, pacer=pacer)
    stream.append(0, 97, clock.now)
    assert await is_written(stream) == ["a"]
    stream.append(0, 98, clock.now)
    stream.deliver(SequenceFinished(ID, 0, FinishReason.MAX_TOKENS, None, 2, 0), clock.now)
    assert await is_written(stream) == ["b", "finished"]


async def test_what_comes_while_a_flush_is_written_is_not_forgotten(text_model: TextModel) -> None:
    """Two sequences; the second one's tokens come between the writes of a flush."""
    clock = Clock()
    pacer = clock.pacer()
    flow(pacer, 500)
    stream = new_stream(text_model, num_sequences=2, pacer=pacer)
    stream.append(0, 97, clock.now)
    message = await stream.next_message()
    assert message is not None and message.delta.text == "a"
    stream.append(1, 98, clock.now)
    stream.append(0, 99, clock.now)
    clock.now += 2 * pacer.pause_s
    await asyncio.sleep(1.5 * pacer.pause_s)
    assert await is_written(stream) == ["b", "c"]
