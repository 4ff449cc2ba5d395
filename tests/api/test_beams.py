"""A beam search as its client reads it."""

from __future__ import annotations

from typing import Any

from protos.quire.inference.v1 import inference_pb2
from scheduler_svc.text.tokenizer import TextModel
from shared.model_spec import ModelSpec
from tests.api.fake_worker import continuation, joined, letter_after
from tests.api.serving import answer, error_of, opened, request, serving, violated_field
from tests.api.tiny_model import VOCAB_SIZE

Beam = inference_pb2.BeamParams
Stopping = inference_pb2.StoppingParams

BAD_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("beam.width", {"beam": Beam(width=1)}),
    ("beam.width", {"beam": Beam(width=17)}),
    ("beam.num_return", {"beam": Beam(width=4, num_return=0)}),
    ("beam.num_return", {"beam": Beam(width=4, num_return=5)}),
    ("beam.length_penalty", {"beam": Beam(width=4, length_penalty=float("nan"))}),
    ("beam.length_penalty", {"beam": Beam(width=4, length_penalty=4.5)}),
    ("beam.early_stopping", {"beam": Beam(width=4, early_stopping=9)}),  # type: ignore[arg-type]
    ("stopping.stop_strings", {"beam": Beam(width=4), "stop": ("x",)}),
]


async def test_the_answers_come_at_the_end_with_their_scores(
    spec: ModelSpec, text_model: TextModel
) -> None:
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        got = await answer(served, request("hello", beam=Beam(width=3, num_return=2)))
        await served.wait_idle()
    assert got.started.beam == Beam(
        width=3,
        length_penalty=1.0,
        early_stopping=inference_pb2.EARLY_STOPPING_HEURISTIC,
        num_return=2,
    )
    assert not got.started.HasField("sampling")
    events = [(r.sequence_index, r.WhichOneof("event")) for r in got.responses[1:]]
    assert events == [(0, "delta"), (0, "finished"), (1, "delta"), (1, "finished")]
    best, second = got.deltas
    assert best.offset == second.offset == 0
    # The worker's certain tokens are the best answer; the next best misses one of them.
    assert list(best.token_ids) == continuation(b"hello", 8, letter_after)
    assert best.text == bytes(best.token_ids).decode()
    assert list(second.token_ids) != list(best.token_ids)
    scores = [r.finished.beam_score for r in got.responses if r.HasField("finished")]
    assert scores == [0.0, -1 / 8]


async def test_each_broken_limit_is_named(spec: ModelSpec, text_model: TextModel) -> None:
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        for field, fields in BAD_REQUESTS:
            error = await error_of(served.generation.Generate(request(**fields)))
            assert violated_field(error) == field, (fields, error)
        many = Stopping(stop_token_ids=range(64), max_tokens=2)
        edges = request(beam=Beam(width=16, length_penalty=-4, num_return=16), stopping=many)
        assert VOCAB_SIZE >= 16 + 64 + 1
        assert (await answer(served, edges)).kinds[0] == "started"


async def test_a_cancelled_search_leaves_nothing(spec: ModelSpec, text_model: TextModel) -> None:
    async with serving(spec, text_model) as served, joined(served.worker()):
        await served.wait_status(1)
        for _ in range(2):
            stream = await opened(served, request(max_tokens=4000, beam=Beam(width=4)))
            stream.cancel()
            await served.wait_live(0)
            await served.wait_idle()
