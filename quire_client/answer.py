"""A whole answer, put together from the events of its stream."""

from __future__ import annotations

from dataclasses import dataclass, field

from protos.quire.inference.v1 import inference_pb2

_REASON_PREFIX = "FINISH_REASON_"


@dataclass(slots=True)
class SequenceAnswer:
    """One choice or beam."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: inference_pb2.Logprobs = field(default_factory=inference_pb2.Logprobs)
    """Of `token_ids`, if asked for."""
    finished: inference_pb2.Finished | None = None
    """None while it goes on, and when the stream broke off."""

    @property
    def finish_reason(self) -> str | None:
        """The short name of why it ended, such as "EOS" or "MAX_TOKENS"; None if it has not."""
        if self.finished is None:
            return None
        name = inference_pb2.FinishReason.Name(self.finished.reason)
        return name.removeprefix(_REASON_PREFIX)

    @property
    def stopped_by(self) -> int | str | None:
        """The token id or the stop string that ended it; None when the reason tells all."""
        kind = None if self.finished is None else self.finished.WhichOneof("stopped_by")
        return None if kind is None else getattr(self.finished, kind)

    @property
    def usage(self) -> inference_pb2.Usage | None:
        """Token counts; None while it goes on."""
        return None if self.finished is None else self.finished.usage

    @property
    def beam_score(self) -> float | None:
        """Of a beam search alone."""
        if self.finished is None or not self.finished.HasField("beam_score"):
            return None
        return self.finished.beam_score


@dataclass(slots=True)
class Answer:
    """What a stream has given so far."""

    started: inference_pb2.Started | None = None
    """None before the request was scheduled."""
    sequences: dict[int, SequenceAnswer] = field(default_factory=dict)
    prompt_token_ids: list[int] = field(default_factory=list)
    """The prompt's tokens but the first, if their log-probabilities were asked for."""
    prompt_logprobs: inference_pb2.Logprobs = field(default_factory=inference_pb2.Logprobs)
    """Of `prompt_token_ids`."""
    num_recoveries: int = 0
    """How often a sequence lost its worker and went on elsewhere."""
    last_event: int = 0
    """Number of the last event, of a request that outlives its call; 0 for others."""

    def add(self, event: inference_pb2.GenerateResponse) -> None:
        """Takes the next event. Raises ValueError when tokens are missing or come twice, which a
        server that keeps the contract never lets happen."""
        self.last_event = event.event_number
        kind = event.WhichOneof("event")
        if kind == "started":
            self.started = event.started
            return
        sequence = self.sequences.setdefault(event.sequence_index, SequenceAnswer())
        if kind == "delta":
            _check_next(event.delta.offset, len(sequence.token_ids))
            sequence.token_ids.extend(event.delta.token_ids)
            sequence.text += event.delta.text
            sequence.logprobs.MergeFrom(event.delta.logprobs)
        elif kind == "prompt_logprobs":
            _check_next(event.prompt_logprobs.offset, 1 + len(self.prompt_token_ids))
            self.prompt_token_ids.extend(event.prompt_logprobs.token_ids)
            self.prompt_logprobs.MergeFrom(event.prompt_logprobs.logprobs)
        elif kind == "finished":
            sequence.finished = event.finished
        elif kind == "recovered":
            self.num_recoveries += 1

    @property
    def first(self) -> SequenceAnswer:
        """The only sequence, or the first or best of several; empty before it has begun."""
        return self.sequences.get(0) or SequenceAnswer()

    @property
    def text(self) -> str:
        """The first sequence's text."""
        return self.first.text

    @property
    def token_ids(self) -> list[int]:
        """The first sequence's token ids."""
        return self.first.token_ids

    @property
    def logprobs(self) -> inference_pb2.Logprobs:
        """Of the first sequence's token ids, if asked for."""
        return self.first.logprobs


def _check_next(offset: int, expected: int) -> None:
    if offset != expected:
        raise ValueError(f"tokens from {offset} on came after {expected}")
