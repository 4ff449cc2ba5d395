"""The simulator's clients: they ask, leave, and compare each token with the model's own answer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from scheduler_svc.core.messages import (
    Event,
    FinishReason,
    NewRequest,
    PromptScored,
    RequestFailed,
    RequestRecovered,
    RequestStarted,
    SequenceFinished,
    TokensAppended,
    TokensStep,
)
from scheduler_svc.core.scheduler import Scheduler
from shared.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, Unavailable
from shared.ids import RequestId
from shared.sampling import BeamParams, EarlyStopping, SamplingParams
from tests.sim.constraint import SimConstraint
from tests.sim.model import NUM_TOKEN_IDS, answers_of, is_beam_answer
from tests.sim.scores import ScoreBook, wanted


@dataclass(slots=True)
class Stream:
    """What one sequence's client knows, and what it must come to."""

    expected: list[int]
    reason: FinishReason
    received: list[int] = field(default_factory=list)
    is_open: bool = True


class Clients:
    """All clients of one world; `streams` are those that have not heard their end."""

    def __init__(
        self,
        rng: Random,
        scheduler: Scheduler,
        tally: Counter[str],
        block_size: int,
        pool_sizes: range,
    ) -> None:
        """`pool_sizes` are the numbers of blocks that a replica may have."""
        self.streams: dict[RequestId, list[Stream]] = {}
        self._rng = rng
        self._scheduler = scheduler
        self._tally = tally
        self._block_size = block_size
        self._pool_sizes = pool_sizes
        self._scores = ScoreBook()
        self._searches: dict[RequestId, NewRequest] = {}
        self._num_requests = 0
        self._prefixes = [self._tokens(rng.randint(4, 16)) for _ in range(3)]

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(NUM_TOKEN_IDS) for _ in range(count))

    def submit(self, now: float) -> None:
        """A request of random kind."""
        rng = self._rng
        prompt = self._tokens(rng.randint(1, 14))
        if rng.random() < 0.6:
            prompt = rng.choice(self._prefixes) + prompt * (rng.random() < 0.8)
        self._num_requests += 1
        num_sequences = rng.choice((1, 1, 1, 2, 3))
        beam = None
        if rng.random() < 0.2:
            beam = BeamParams(
                width=max(2, num_sequences),
                length_penalty=rng.choice((-1.0, 0.0, 1.0)),
                early_stopping=rng.choice(list(EarlyStopping)),
                num_return=num_sequences,
            )
        constraint = None
        if beam is None and rng.random() < 0.25:
            constraint = SimConstraint(rng.randrange(1000))
        num_logprobs, num_scored = wanted(self._num_requests, is_beam=beam is not None)
        request = NewRequest(
            request_id=RequestId(f"r{self._num_requests}"),
            prompt_token_ids=prompt,
            sampling=SamplingParams(seed=rng.randrange(4), num_logprobs=num_logprobs),
            max_tokens=rng.choice((1, 2, self._block_size, self._block_size + 1, 20, 30)),
            eos_token_ids=frozenset(self._tokens(rng.choice((0, 0, 1, 3)))),
            stop_token_ids=frozenset(self._tokens(rng.choice((0, 0, 3)))),
            num_sequences=num_sequences,
            beam=beam,
            constraint=constraint,
            num_prompt_logprobs=num_scored,
            priority=rng.choice((0, 0, 0, 1, -1)),
            queue_timeout_s=rng.choice((None, None, 3.0)),
            deadline_s=rng.choice((None, None, 4.0)),
            tenant=rng.choice(("default", "default", "heavy")),
            cache_salt=rng.choice((b"", b"", b"x")),
            bypass_prefix_cache=rng.random() < 0.1,
        )
        self._send(request, now)

    def common_prompts(self) -> list[tuple[int, ...]]:
        """What many prompts of the world begin with, with one token more."""
        return [(*prefix, 0) for prefix in self._prefixes]

    def ask(self, prompt: tuple[int, ...], now: float) -> None:
        """A plain request for one token."""
        self._num_requests += 1
        name = RequestId(f"r{self._num_requests}")
        self._send(NewRequest(name, prompt, SamplingParams(), max_tokens=1), now)

    def _send(self, request: NewRequest, now: float) -> None:
        try:
            self._scheduler.submit(request, now)
        except (Unavailable, InvalidArgument, ResourceExhausted, DeadlineExceeded) as error:
            self._tally[type(error).__name__] += 1
            return
        self._scores.add(request)
        if request.beam is not None:
            self._tally["beam"] += 1
            self._searches[request.request_id] = request
        self.streams[request.request_id] = [
            Stream(*expected) for expected in answers_of(request, self._block_size)
        ]

    def abort(self) -> None:
        """A client leaves."""
        if self.streams:
            request_id = self._rng.choice(list(self.streams))
            del self.streams[request_id]
            self._scheduler.abort(request_id)
            self._tally["abort"] += 1

    def cancel(self) -> None:
        """The operator ends a request: each of its streams that is open hears of it."""
        if not self.streams:
            return
        request_id = self._rng.choice(list(self.streams))
        ends = {end.sequence_index: end for end in self._scheduler.cancel(request_id)}
        for index, stream in enumerate(self.streams.pop(request_id)):
            assert (index in ends) == stream.is_open
            if stream.is_open:
                assert ends[index].num_output_tokens == len(stream.received)
        self._tally["cancel"] += 1

    def stop(self) -> None:
        """A stop string is found in some stream's text."""
        for request_id, streams in self.streams.items():
            for index, stream in enumerate(streams):
                if stream.is_open and stream.received:
                    end = self._scheduler.finish_sequence(request_id, index)
                    assert end is not None and end.num_output_tokens == len(stream.received)
                    self._close(request_id, stream)
                    self._tally["stop"] += 1
                    return

    def _close(self, request_id: RequestId, stream: Stream) -> None:
        assert stream.is_open, "a sequence ended twice"
        stream.is_open = False
        if not any(other.is_open for other in self.streams[request_id]):
            if request_id in self._searches:
                got = [(stream.received, stream.reason) for stream in self.streams[request_id]]
                assert is_beam_answer(
                    self._searches[request_id], got, self._block_size, self._pool_sizes
                )
            del self.streams[request_id]

    def take(self, events: list[Event]) -> None:
        """What the scheduler tells them, in order."""
        for event in events:
            self._tally[type(event).__name__] += 1
            self._scores.take(event, self.streams)
            if isinstance(event, TokensStep):
                assert len(set(event.sequences)) == len(event.sequences) == len(event.token_ids)
                for ref, token in zip(event.sequences, event.token_ids, strict=True):
                    stream = self.streams[ref.request_id][ref.sequence_index]
                    assert stream.is_open, "a token after the end"
                    stream.received.append(token)
                    at = len(stream.received)
                    assert stream.received[-1] == stream.expected[at - 1], (ref, at)
            elif isinstance(event, TokensAppended):
                self._take_answer(event)
            elif isinstance(event, SequenceFinished):
                self._check_end(event)
            elif isinstance(event, RequestFailed):
                self._tally[event.kind.value] += 1
                del self.streams[event.request_id]
            else:
                assert isinstance(event, RequestStarted | RequestRecovered | PromptScored)
                assert event.request_id in self.streams

    def _take_answer(self, event: TokensAppended) -> None:
        """The whole answer of a beam search comes at once."""
        stream = self.streams[event.request_id][event.sequence_index]
        assert stream.is_open and not stream.received
        stream.received = list(event.token_ids)

    def _check_end(self, event: SequenceFinished) -> None:
        stream = self.streams[event.request_id][event.sequence_index]
        self._tally[event.reason.name] += 1
        if event.request_id in self._searches:
            stream.expected, stream.reason = stream.received, event.reason
        elif event.reason is FinishReason.CONTEXT_LIMIT:
            is_cut = len(stream.received) < len(stream.expected)
            assert is_cut or stream.reason is not FinishReason.MAX_TOKENS
        else:
            assert (stream.received, event.reason) == (stream.expected, stream.reason), event
        is_hidden = event.reason in (FinishReason.EOS, FinishReason.STOP_TOKEN)
        assert event.num_output_tokens == len(stream.received) + is_hidden
        assert (event.stop_token_id is not None) == is_hidden
        self._close(event.request_id, stream)
