"""Sampling parameters and log-probabilities survive the wire; impossible ones are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.quire.worker.v1 import worker_pb2
from shared.codec import decode_plan, decode_result, encode_plan, encode_result
from shared.errors import ProtocolError
from shared.logprobs import LogprobRows
from shared.plan import SequenceStart, StepPlan, StepResult
from shared.sampling import SamplingParams, TokenRules

u32 = st.integers(0, 2**32 - 1)
token_ids = st.lists(u32, max_size=6, unique=True).map(tuple)
penalties = st.floats(-2, 2, width=32)
log_probs = st.floats(max_value=0, allow_nan=False, width=32)
counts = st.integers(0, 200)


@st.composite
def token_rules(draw: st.DrawFn) -> TokenRules:
    biased = draw(token_ids)
    words = st.lists(u32, min_size=1, max_size=4).map(tuple)
    return TokenRules(
        repetition_penalty=draw(st.floats(0.125, 10, width=32)),
        presence_penalty=draw(penalties),
        frequency_penalty=draw(penalties),
        bias_token_ids=biased,
        biases=tuple(draw(st.floats(-100, 100, width=32)) for _ in biased),
        allowed_token_ids=draw(token_ids),
        banned_token_ids=draw(token_ids),
        bad_words=draw(st.lists(words, max_size=3).map(tuple)),
        min_tokens=draw(u32),
        end_token_ids=draw(token_ids),
    )


@st.composite
def starts(draw: st.DrawFn) -> SequenceStart:
    asked = draw(st.none() | counts)
    sampling = SamplingParams(
        typical_p=draw(st.floats(0.125, 1, width=32)),
        rules=draw(token_rules() | st.just(TokenRules())),
        num_logprobs=draw(st.none() | counts),
    )
    return SequenceStart(
        handle=1,
        token_ids=(5, 6, 7),
        num_prompt_tokens=3,
        num_computed_tokens=0,
        block_table=(0,),
        sampling=sampling,
        num_prompt_logprobs=asked,
        first_prompt_logprob=0 if asked is None else draw(st.integers(1, 3)),
    )


@st.composite
def logprob_rows(draw: st.DrawFn) -> LogprobRows:
    handles = draw(st.lists(u32, max_size=3, unique=True).map(tuple))
    places = tuple(draw(st.integers(1, 3)) for _ in handles)
    tops = tuple(draw(st.integers(0, 3)) for _ in handles)
    num_places = sum(places)
    num_entries = sum(place * top for place, top in zip(places, tops, strict=True))
    return LogprobRows(
        handles,
        places,
        tops,
        log_probs=tuple(draw(log_probs) for _ in range(num_places)),
        ranks=tuple(draw(st.integers(1, 2**32 - 1)) for _ in range(num_places)),
        top_token_ids=tuple(draw(u32) for _ in range(num_entries)),
        top_log_probs=tuple(draw(log_probs) for _ in range(num_entries)),
    )


@settings(deadline=None, derandomize=True, max_examples=40)
@given(starts())
def test_parameters_survive_the_wire(start: SequenceStart) -> None:
    plan = StepPlan(step=1, base_step=0, starts=(start,))
    frame = encode_plan(plan).SerializeToString()
    assert decode_plan(worker_pb2.StepPlan.FromString(frame)) == plan


@settings(deadline=None, derandomize=True, max_examples=40)
@given(logprob_rows(), logprob_rows())
def test_log_probabilities_survive_the_wire(told: LogprobRows, prompts: LogprobRows) -> None:
    result = StepResult(step=1, handles=(), token_ids=(), logprobs=told, prompt_logprobs=prompts)
    frame = encode_result(result).SerializeToString()
    decoded = decode_result(worker_pb2.StepResult.FromString(frame))
    assert decoded == result
    by_handle = decoded.logprobs.by_handle()
    assert list(by_handle) == list(told.handles)
    told_again = [value for own in by_handle.values() for value in own.log_probs]
    assert told_again == list(told.log_probs)
    tops = [token for own in by_handle.values() for token in own.top_token_ids]
    assert tops == list(told.top_token_ids)


def test_parameters_that_do_nothing_take_no_room() -> None:
    start = SequenceStart(1, (5,), 1, 0, (0,), SamplingParams())
    assert encode_plan(StepPlan(1, 0, starts=(start,))).starts[0].sampling.ByteSize() <= 16


NAN = float("nan")
RULES = TokenRules()
BROKEN_RULES = {
    "no repetition penalty": replace(RULES, repetition_penalty=0.0, min_tokens=1),
    "repetition NaN": replace(RULES, repetition_penalty=NAN),
    "presence NaN": replace(RULES, presence_penalty=NAN),
    "frequency infinite": replace(RULES, frequency_penalty=float("inf")),
    "bias NaN": replace(RULES, bias_token_ids=(1,), biases=(NAN,)),
    "bias missing": replace(RULES, bias_token_ids=(1, 2), biases=(1.0,)),
    "biased twice": replace(RULES, bias_token_ids=(1, 1), biases=(1.0, 1.0)),
    "allowed twice": replace(RULES, allowed_token_ids=(1, 1)),
    "empty bad word": replace(RULES, bad_words=((),)),
}
BROKEN_STARTS = {
    **{
        name: SequenceStart(1, (5,), 1, 0, (0,), SamplingParams(rules=rules))
        for name, rules in BROKEN_RULES.items()
    },
    "a beam with rules": SequenceStart(
        1, (5,), 1, 0, (0,), SamplingParams(rules=replace(RULES, banned_token_ids=(1,))), 0, 4
    ),
    "too many likeliest": SequenceStart(1, (5,), 1, 0, (0,), SamplingParams(num_logprobs=257)),
    "too many of the prompt": SequenceStart(
        1, (5,), 1, 0, (0,), SamplingParams(), num_prompt_logprobs=257, first_prompt_logprob=1
    ),
    "of the first token": SequenceStart(1, (5,), 1, 0, (0,), SamplingParams(), 0, 0, 2, 0),
}


@pytest.mark.parametrize("name", BROKEN_STARTS)
def test_impossible_parameters_are_refused(name: str) -> None:
    with pytest.raises(ProtocolError):
        decode_plan(encode_plan(StepPlan(1, 0, starts=(BROKEN_STARTS[name],))))


TOLD = LogprobRows((1, 2), (1, 1), (2, 0), (-1.0, -2.0), (1, 2), (5, 6), (-1.0, -1.5))
BROKEN_ROWS = {
    "places missing": replace(TOLD, num_places=(1,)),
    "no place": replace(TOLD, num_places=(2, 0)),
    "numbers missing": replace(TOLD, num_tops=(2,)),
    "told twice": replace(TOLD, handles=(1, 1)),
    "one missing": replace(TOLD, log_probs=(-1.0,)),
    "one too many": replace(TOLD, log_probs=(-1.0, -2.0, -3.0), ranks=(1, 2, 3)),
    "rank missing": replace(TOLD, ranks=(1,)),
    "rank 0": replace(TOLD, ranks=(1, 0)),
    "likeliest missing": replace(TOLD, top_token_ids=(5,), top_log_probs=(-1.0,)),
    "likeliest unlike": replace(TOLD, top_log_probs=(-1.0,)),
    "above 0": replace(TOLD, log_probs=(0.25, -2.0)),
    "not a number": replace(TOLD, top_log_probs=(-1.0, NAN)),
}


@pytest.mark.parametrize("name", BROKEN_ROWS)
def test_impossible_log_probabilities_are_refused(name: str) -> None:
    sound = StepResult(step=1, handles=(), token_ids=())
    decode_result(encode_result(replace(sound, logprobs=TOLD, prompt_logprobs=TOLD)))
    broken = BROKEN_ROWS[name]
    for result in (replace(sound, logprobs=broken), replace(sound, prompt_logprobs=broken)):
        with pytest.raises(ProtocolError):
            decode_result(encode_result(result))
