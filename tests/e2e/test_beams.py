"""Beams and choices of the real model."""

from __future__ import annotations

import pytest

from protos.quire.inference.v1 import inference_pb2
from tests.e2e.beam_reference import NUM_TOKENS, PROMPTS, WIDTH, read_beams
from tests.e2e.cluster import Cluster
from tests.e2e.reference import Continuation

NUM_CHOICES = 4


def _choices(first: int, count: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        text="Once upon a time, in a small village by the sea,",
        sampling=inference_pb2.SamplingParams(
            temperature=0.9, top_p=0.95, seed=5, n=count, first_choice=first
        ),
        stopping=inference_pb2.StoppingParams(max_tokens=24, ignore_eos=True),
    )


def test_beams_are_those_of_transformers(
    plain: Cluster, greedy_continuations: dict[str, Continuation]
) -> None:
    kept = read_beams()
    assert len(kept) == len(PROMPTS) == 10
    for name, expected in kept.items():
        prompt = greedy_continuations[name].prompt_token_ids
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=prompt),
            beam=inference_pb2.BeamParams(width=WIDTH, num_return=WIDTH),
            stopping=inference_pb2.StoppingParams(max_tokens=NUM_TOKENS),
        )
        answers = plain.sequences(request)
        assert [answer.token_ids for answer in answers] == [beam.token_ids for beam in expected]
        for answer, beam in zip(answers, expected, strict=True):
            assert answer.finished is not None
            assert answer.finished.beam_score == pytest.approx(beam.score, abs=1e-3)
            is_eos = answer.finished.reason == inference_pb2.FINISH_REASON_EOS
            assert is_eos == beam.is_ended


def test_a_choice_alone_is_the_same(plain: Cluster) -> None:
    """FIELD-FAILURES, part 1: each choice equals n=1 with its derived draws."""
    together = plain.sequences(_choices(0, NUM_CHOICES))
    alone = [plain.sequences(_choices(index, 1))[0] for index in range(NUM_CHOICES)]
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]
    assert len({tuple(a.token_ids) for a in together}) == NUM_CHOICES
