"""Maps sampling parameters to the worker plane's messages and back; see `shared.codec`."""

from __future__ import annotations

from collections.abc import Sequence

from protos.quire.worker.v1 import worker_pb2
from shared.codec_checks import require, require_same_length
from shared.sampling import NO_RULES, SamplingParams, TokenRules

MAX_TEMPERATURE = 100.0
MAX_LOGPROBS = 256
MAX_PENALTY, MAX_BIAS = 100.0, 1000.0
"""Bounds of magnitude, beyond those that the public contract sets."""


def encode_sampling(sampling: SamplingParams) -> worker_pb2.SamplingParams:
    """The message of a sequence's parameters."""
    return worker_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        typical_p=sampling.typical_p,
        rules=None if sampling.rules == NO_RULES else _encode_rules(sampling.rules),
        num_logprobs=sampling.num_logprobs,
    )


def decode_sampling(message: worker_pb2.SamplingParams) -> SamplingParams:
    """The parameters of a message; ProtocolError when a value is out of range."""
    # Each comparison is false for NaN.
    require(0 <= message.temperature <= MAX_TEMPERATURE, "a temperature is out of range")
    require(0 < message.top_p <= 1, "a top_p is out of range")
    require(0 <= message.min_p <= 1, "a min_p is out of range")
    require(0 < message.typical_p <= 1, "a typical_p is out of range")
    require(message.num_logprobs <= MAX_LOGPROBS, "too many log-probabilities are asked for")
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        seed=message.seed,
        typical_p=message.typical_p,
        rules=_decode_rules(message.rules) if message.HasField("rules") else NO_RULES,
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
    )


def _encode_rules(rules: TokenRules) -> worker_pb2.TokenRules:
    return worker_pb2.TokenRules(
        repetition_penalty=rules.repetition_penalty,
        presence_penalty=rules.presence_penalty,
        frequency_penalty=rules.frequency_penalty,
        bias_token_ids=rules.bias_token_ids,
        biases=rules.biases,
        allowed_token_ids=rules.allowed_token_ids,
        banned_token_ids=rules.banned_token_ids,
        bad_words=[worker_pb2.BadWord(token_ids=word) for word in rules.bad_words],
        min_tokens=rules.min_tokens,
        end_token_ids=rules.end_token_ids,
    )


def _decode_rules(message: worker_pb2.TokenRules) -> TokenRules:
    repetition = message.repetition_penalty
    require(1 / MAX_PENALTY <= repetition <= MAX_PENALTY, "a repetition penalty is out of range")
    for penalty in (message.presence_penalty, message.frequency_penalty):
        require(abs(penalty) <= MAX_PENALTY, "a penalty is out of range")
    require_same_length("biases", message.bias_token_ids, message.biases)
    require(all(abs(bias) <= MAX_BIAS for bias in message.biases), "a bias is out of range")
    words = tuple(tuple(word.token_ids) for word in message.bad_words)
    require(all(words), "a bad word is empty")
    return TokenRules(
        repetition_penalty=repetition,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        bias_token_ids=_distinct(message.bias_token_ids),
        biases=tuple(message.biases),
        allowed_token_ids=_distinct(message.allowed_token_ids),
        banned_token_ids=tuple(message.banned_token_ids),
        bad_words=words,
        min_tokens=message.min_tokens,
        end_token_ids=tuple(message.end_token_ids),
    )


def _distinct(token_ids: Sequence[int]) -> tuple[int, ...]:
    require(len(set(token_ids)) == len(token_ids), "a list of token ids names one twice")
    return tuple(token_ids)
