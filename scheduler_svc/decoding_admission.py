"""Checks how a request wants its tokens chosen and when it stops, and resolves the defaults."""

from __future__ import annotations

import os
from collections.abc import Sequence

from protos.quire.inference.v1 import inference_pb2
from scheduler_svc.limits import (
    Limits,
    check_bytes,
    check_count,
    check_range,
    check_share,
    check_token_ids,
)
from shared.errors import InvalidArgument
from shared.model_spec import ModelSpec
from shared.sampling import BeamParams, EarlyStopping, SamplingParams, TokenRules

GREEDY = SamplingParams(temperature=0.0)
"""What a beam search has in place of sampling parameters: it draws nothing."""


class DecodingAdmission:
    """The part of admission that is about sampling, beams, stopping and log-probabilities."""

    def __init__(self, spec: ModelSpec, limits: Limits) -> None:
        self._spec = spec
        self._limits = limits

    def check(self, message: inference_pb2.GenerateRequest) -> None:
        """Checks all that needs no tokenizer; raises InvalidArgument with the field's path."""
        if message.HasField("beam"):
            self._check_beam(message)
        else:
            self._check_sampling(message.sampling)
            self._check_token_lists(message.sampling)
            self._check_choices(message.sampling)
        self._check_stopping(message.stopping)
        if message.stopping.min_tokens and message.WhichOneof("constraint") is not None:
            text = "a constraint alone says where the text may end"
            raise InvalidArgument("stopping.min_tokens", text)
        for field in ("num_logprobs", "num_prompt_logprobs"):
            asked = getattr(message.response, field)
            check_range(f"response.{field}", asked, 0, self._limits.max_logprobs)

    # -- what holds --------------------------------------------------------------------------

    def sampling(
        self, message: inference_pb2.GenerateRequest, bad_words: Sequence[Sequence[int]]
    ) -> SamplingParams:
        """The parameters in force of a checked message: those given, defaults, and a seed drawn
        when there is none. Raises InvalidArgument when its lists leave no token to draw."""
        sampling, defaults = message.sampling, self._spec.sampling_defaults
        rules = self._rules(message, bad_words)
        self._check_some_left(rules)
        has = sampling.HasField
        return SamplingParams(
            temperature=sampling.temperature if has("temperature") else defaults.temperature,
            top_k=sampling.top_k if has("top_k") else min(defaults.top_k, self._spec.vocab_size),
            top_p=sampling.top_p if has("top_p") else defaults.top_p,
            min_p=sampling.min_p if has("min_p") else defaults.min_p,
            seed=sampling.seed if has("seed") else int.from_bytes(os.urandom(8)),
            typical_p=sampling.typical_p if has("typical_p") else defaults.typical_p,
            rules=rules,
            num_logprobs=self.num_logprobs(message.response, "num_logprobs"),
        )

    def beam(self, message: inference_pb2.GenerateRequest) -> BeamParams | None:
        """The parameters in force of a checked beam search; None for what samples."""
        if not message.HasField("beam"):
            return None
        beam, has = message.beam, message.beam.HasField
        defaults = BeamParams(beam.width)
        penalty = beam.length_penalty if has("length_penalty") else defaults.length_penalty
        return BeamParams(
            width=beam.width,
            length_penalty=penalty,
            early_stopping=EarlyStopping(beam.early_stopping or defaults.early_stopping.value),
            num_return=beam.num_return if has("num_return") else defaults.num_return,
        )

    def num_logprobs(self, response: inference_pb2.ResponseOptions, field: str) -> int | None:
        """How many likeliest tokens are told at each place; None where nothing is."""
        if not response.HasField(field):
            return None
        asked: int = getattr(response, field)
        return min(asked, self._spec.vocab_size)

    def _rules(
        self, message: inference_pb2.GenerateRequest, bad_words: Sequence[Sequence[int]]
    ) -> TokenRules:
        sampling, stopping = message.sampling, message.stopping
        repetition_penalty = self._spec.sampling_defaults.repetition_penalty
        if sampling.HasField("repetition_penalty"):
            repetition_penalty = sampling.repetition_penalty
        end_token_ids = {*stopping.stop_token_ids}
        if not stopping.ignore_eos:
            end_token_ids.update(self._spec.eos_token_ids)
        is_held_off = bool(stopping.min_tokens and end_token_ids)
        bias_token_ids = sorted(sampling.logit_bias)
        return TokenRules(
            repetition_penalty=repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            bias_token_ids=tuple(bias_token_ids),
            biases=tuple(sampling.logit_bias[token_id] for token_id in bias_token_ids),
            allowed_token_ids=tuple(sorted(set(sampling.allowed_token_ids))),
            banned_token_ids=tuple(sorted(set(sampling.banned_token_ids))),
            bad_words=tuple(tuple(word) for word in bad_words),
            min_tokens=stopping.min_tokens if is_held_off else 0,
            end_token_ids=tuple(sorted(end_token_ids)) if is_held_off else (),
        )

    # -- checks ------------------------------------------------------------------------------

    def _check_sampling(self, sampling: inference_pb2.SamplingParams) -> None:
        limits, has = self._limits, sampling.HasField
        ranges = {
            "temperature": (0, limits.max_temperature),
            "top_k": (0, self._spec.vocab_size),
            "min_p": (0, 1),
            "repetition_penalty": (limits.min_repetition_penalty, limits.max_repetition_penalty),
            "presence_penalty": (-limits.max_penalty, limits.max_penalty),
            "frequency_penalty": (-limits.max_penalty, limits.max_penalty),
        }
        for name, (lowest, highest) in ranges.items():
            if has(name):
                check_range(f"sampling.{name}", getattr(sampling, name), lowest, highest)
        for name in ("top_p", "typical_p"):
            if has(name):
                check_share(f"sampling.{name}", getattr(sampling, name))

    def _check_token_lists(self, sampling: inference_pb2.SamplingParams) -> None:
        limits, vocab_size = self._limits, self._spec.vocab_size
        check_count("sampling.logit_bias", list(sampling.logit_bias), limits.max_logit_biases)
        for token_id, bias in sampling.logit_bias.items():
            field = f"sampling.logit_bias[{token_id}]"
            if token_id >= vocab_size:
                raise InvalidArgument(field, f"{token_id} is not in [0, {vocab_size})")
            check_range(field, bias, -limits.max_logit_bias, limits.max_logit_bias)
        for name in ("allowed_token_ids", "banned_token_ids"):
            token_ids = getattr(sampling, name)
            check_count(f"sampling.{name}", token_ids, limits.max_listed_token_ids)
            check_token_ids(f"sampling.{name}", token_ids, vocab_size)
        check_count("sampling.bad_words", sampling.bad_words, limits.max_bad_words)
        for index, word in enumerate(sampling.bad_words):
            field = f"sampling.bad_words[{index}]"
            if not word:
                raise InvalidArgument(field, "a bad word is empty")
            check_bytes(field, word, limits.max_bad_word_bytes)

    def _check_some_left(self, rules: TokenRules) -> None:
        """Whatever came before, a token must be left."""
        taken = {*rules.banned_token_ids, *rules.end_token_ids}
        taken.update(word[-1] for word in rules.bad_words)
        if rules.allowed_token_ids:
            if taken.issuperset(rules.allowed_token_ids):
                text = "bans, bad words and min_tokens may leave none of them to draw"
                raise InvalidArgument("sampling.allowed_token_ids", text)
        elif len(taken) >= self._spec.vocab_size:
            text = "bans, bad words and min_tokens may leave no token to draw"
            raise InvalidArgument("sampling.banned_token_ids", text)

    def _check_choices(self, sampling: inference_pb2.SamplingParams) -> None:
        limits = self._limits
        if sampling.HasField("n"):
            check_range("sampling.n", sampling.n, 1, limits.max_choices)
        most = limits.max_first_choice
        check_range("sampling.first_choice", sampling.first_choice, 0, most)

    def _check_beam(self, message: inference_pb2.GenerateRequest) -> None:
        limits, beam, stopping = self._limits, message.beam, message.stopping
        check_range("beam.width", beam.width, 2, limits.max_beam_width)
        if beam.HasField("num_return"):
            check_range("beam.num_return", beam.num_return, 1, beam.width)
        penalty, most = beam.length_penalty, limits.max_length_penalty
        check_range("beam.length_penalty", penalty, -most, most)
        if beam.early_stopping not in inference_pb2.EarlyStopping.values():
            raise InvalidArgument("beam.early_stopping", f"{beam.early_stopping} is unknown")
        if stopping.stop_strings:
            raise InvalidArgument("stopping.stop_strings", "a beam search takes none")
        if stopping.min_tokens:
            raise InvalidArgument("stopping.min_tokens", "a beam search takes none")
        for field in ("num_logprobs", "num_prompt_logprobs"):
            if message.response.HasField(field):
                raise InvalidArgument(f"response.{field}", "a beam search gives none")
        num_ends = len(stopping.stop_token_ids) + len(self._spec.eos_token_ids)
        if beam.width + num_ends > self._spec.vocab_size:
            raise InvalidArgument("beam.width", "the vocabulary is too small for so many beams")

    def _check_stopping(self, stopping: inference_pb2.StoppingParams) -> None:
        limits = self._limits
        most = self._spec.context_length
        if stopping.HasField("max_tokens"):
            if stopping.max_tokens < 1:
                raise InvalidArgument("stopping.max_tokens", "must be at least 1")
            most = min(most, stopping.max_tokens)
        check_range("stopping.min_tokens", stopping.min_tokens, 0, most)
        check_count("stopping.stop_strings", stopping.stop_strings, limits.max_stop_strings)
        for index, text in enumerate(stopping.stop_strings):
            field = f"stopping.stop_strings[{index}]"
            if not text:
                raise InvalidArgument(field, "a stop string is empty")
            check_bytes(field, text, limits.max_stop_string_bytes)
        check_count("stopping.stop_token_ids", stopping.stop_token_ids, limits.max_stop_token_ids)
        check_token_ids("stopping.stop_token_ids", stopping.stop_token_ids, self._spec.vocab_size)
