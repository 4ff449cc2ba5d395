"""What goes into the core and what comes out: values, no behaviour.

In: NewRequest (submit), ReplicaCapacity (replica_joined), StepResult (apply_result).
Out: StepPlan (schedule), and events for the clients' streams.

A step's tokens come as one TokensStep over all requests, since that is what every step touches;
all other events are of one request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from scheduler_svc.core.constraint import TokenConstraint
from shared.ids import ReplicaId, RequestId
from shared.logprobs import Logprobs
from shared.sampling import BeamParams, SamplingParams

DEFAULT_TENANT = "default"
"""Whose requests are that come without a tenant's name."""


class FinishReason(Enum):
    """Why a sequence ended; the numbers are those of the public contract."""

    EOS = 1
    STOP_TOKEN = 2
    STOP_STRING = 3
    MAX_TOKENS = 4
    CONTEXT_LIMIT = 5
    CANCELLED = 6
    CONSTRAINT_COMPLETE = 7


class FailureKind(Enum):
    """Why a request failed; the shell makes a gRPC status of it."""

    QUEUE_TIMEOUT = "queue_timeout"
    DEADLINE = "deadline"
    """Its deadline would pass before its first token, by the measured rates."""
    SEQUENCE_FAILED = "sequence_failed"
    """The worker reported a failure of this sequence alone, or its constraint can't go on."""
    REPLICA_LOST_TOO_OFTEN = "replica_lost_too_often"
    NO_REPLICA = "no_replica"
    """The last replica is gone and none came back within the grace."""
    TOO_LARGE = "too_large"
    """No replica that is left can ever hold it."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A validated request, tokenized; `max_tokens` is already bounded by the context."""

    request_id: RequestId
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    max_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    """Empty when the client ignores the end of sequence."""
    stop_token_ids: frozenset[int] = frozenset()
    num_sequences: int = 1
    """How many answers the client gets."""
    first_choice: int = 0
    """Sequence i draws as choice `first_choice + i` of its seed."""
    beam: BeamParams | None = None
    """For a beam search, whose `num_return` is num_sequences; `sampling` is greedy then."""
    constraint: TokenConstraint | None = None
    """What each sequence must obey, from its first token on; each gets a copy. None in a beam
    search."""
    num_prompt_logprobs: int | None = None
    """With each token of the prompt but the first come its log-probability and those of so many
    likeliest ones, given by sequence 0; None: nothing."""
    priority: int = 0
    queue_timeout_s: float | None = None
    """Seconds from its submission in which it must start."""
    deadline_s: float | None = None
    """Seconds from its submission after which nobody waits for it any more."""
    tenant: str = DEFAULT_TENANT
    """Whose it is, for fairness between tenants."""
    adapter: str = ""
    """Weights that change the model's for it, by name; its cached blocks are of no use to others.
    Empty for the model as it is."""
    cache_salt: bytes = b""
    bypass_prefix_cache: bool = False
    """Takes no cached prefix, and leaves none to others; its own choices still share its prompt."""

    @property
    def num_beams(self) -> int:
        """Sequences that must run side by side on one replica."""
        return 1 if self.beam is None else self.beam.width

    @property
    def most_tokens(self) -> int:
        """What prompt and answers may come to."""
        count = max(self.num_sequences, self.num_beams)
        return len(self.prompt_token_ids) + count * self.max_tokens

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a sequence."""
        return self.eos_token_ids | self.stop_token_ids


@dataclass(frozen=True, slots=True)
class ReplicaCapacity:
    """What a replica said it can hold, as measured there."""

    num_device_blocks: int
    num_host_blocks: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    block_bytes: int = 0
    copy_bytes_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0


class SequenceRef(NamedTuple):
    """Names a sequence. One object for the sequence's whole life, cheap to hash."""

    request_id: RequestId
    sequence_index: int


@dataclass(frozen=True, slots=True)
class TokensStep:
    """One step's new tokens: `token_ids[i]` is the next token of `sequences[i]`.

    A sequence is in it at most once. The token that ended a sequence is not in it when it is an
    end-of-sequence or stop token. The step's SequenceFinished events come after it.
    """

    sequences: Sequence[SequenceRef]
    token_ids: Sequence[int]
    logprobs: Mapping[int, Logprobs] | None = None
    """One place for each `i` whose sequence asked for it; None where none did."""


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """The request was scheduled for the first time."""

    request_id: RequestId
    replica: ReplicaId
    num_cached_tokens: int
    started_s: float


@dataclass(frozen=True, slots=True)
class TokensAppended:
    """The whole answer of a beam search."""

    request_id: RequestId
    sequence_index: int
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of the prompt's tokens from place `offset` on, by sequence 0. Over all
    events of a request each place from 1 on comes once, in order, before the sequence's tokens."""

    request_id: RequestId
    offset: int
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    """One sequence ended by itself; nothing more comes for it."""

    request_id: RequestId
    sequence_index: int
    reason: FinishReason
    stop_token_id: int | None
    num_output_tokens: int
    """With the token that ended it."""
    num_preemptions: int
    beam_score: float | None = None
    """Of a beam search alone."""


@dataclass(frozen=True, slots=True)
class RequestRecovered:
    """The replica was lost; the request waits to go on elsewhere."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The whole request failed; all its sequences are gone."""

    request_id: RequestId
    kind: FailureKind
    message: str


RequestEvent = (
    RequestStarted
    | PromptScored
    | TokensAppended
    | SequenceFinished
    | RequestRecovered
    | RequestFailed
)
"""What the shell hands to the front of one request."""

Event = RequestEvent | TokensStep
"""What the core gives, in order."""
