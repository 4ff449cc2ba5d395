"""One step as values: what the scheduler plans and what a worker gives back.

A plan is a difference to the state after `base_step`; the worker applies it in the order of the
fields and derives positions, slots and decode inputs itself. `shared.codec` maps it to protobuf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from shared.logprobs import NO_LOGPROBS, LogprobRows
from shared.sampling import SamplingParams


class CacheOpKind(Enum):
    """A movement of KV blocks."""

    SWAP_OUT = 1  # device blocks -> host blocks
    SWAP_IN = 2  # host blocks -> device blocks
    COPY = 3  # device blocks -> device blocks


@dataclass(frozen=True, slots=True)
class CacheOp:
    """Moves `source_blocks[i]` to `target_blocks[i]` before the forward pass."""

    id: int
    kind: CacheOpKind
    source_blocks: Sequence[int]
    target_blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """A sequence given whole: a new one, or one that comes back after preemption or loss."""

    handle: int
    token_ids: Sequence[int]
    """All tokens known so far: the prompt, then what was generated."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """The first so many tokens have their keys and values in `block_table` already."""
    block_table: Sequence[int]
    sampling: SamplingParams
    sequence_index: int = 0
    num_candidates: int = 0
    """Above 0 the sequence is a beam: it draws no token, and gives so many candidates for it."""
    num_prompt_logprobs: int | None = None
    """With each token of the prompt come its log-probability and those of so many likeliest, when
    the token before it is computed; None: nothing."""
    first_prompt_logprob: int = 0
    """The first place of the prompt whose log-probabilities are wanted still."""


@dataclass(frozen=True, slots=True)
class Fork:
    """`handle` starts as a copy of the beam `source`, with other blocks from its first slot that
    is not computed:

        source   | full | full | partly filled |      | full | full |
        handle   | full | full |     block     |  or  | full | full | block |

    The full blocks are shared; the plan copies a partly filled one to `block`.
    """

    handle: int
    source: int
    block: int


@dataclass(frozen=True, slots=True)
class TokenMask:
    """The tokens that a constrained sequence may draw; one of the two forms is set, whichever is
    smaller."""

    token_ids: Sequence[int] = ()
    """Ascending."""
    bits: bytes = b""
    """ceil(vocab_size / 8) bytes: token i is bit i % 8, counted from the lowest, of byte i // 8."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one replica does in one step: sequences come and go, then blocks are moved, then tokens
    are computed. Sequences may be computed in any order: none reads a block that another writes."""

    step: int
    base_step: int
    reset: bool = False
    """Forget every sequence first."""
    finished_handles: Sequence[int] = ()
    starts: Sequence[SequenceStart] = ()
    forks: Sequence[Fork] = ()
    """No source is the handle of another fork."""
    chosen_handles: Sequence[int] = ()
    """With `chosen_token_ids`: beam i goes on with token i; sources were copied before."""
    chosen_token_ids: Sequence[int] = ()
    append_handles: Sequence[int] = ()
    """With `append_blocks`: handle i gets block i at the end of its table."""
    append_blocks: Sequence[int] = ()
    cache_ops: Sequence[CacheOp] = ()
    decode_handles: Sequence[int] = ()
    """Sequences that compute one token and sample the next, or give candidates for it."""
    chunk_handles: Sequence[int] = ()
    """Sequences that compute `chunk_num_tokens[i]` tokens and sample if `chunk_samples[i]`."""
    chunk_num_tokens: Sequence[int] = ()
    chunk_samples: Sequence[bool] = ()
    masked_handles: Sequence[int] = ()
    """With `masks`: sequences that sample in this step, and may draw the tokens of mask i alone."""
    masks: Sequence[TokenMask] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.decode_handles) + sum(self.chunk_num_tokens)


@dataclass(frozen=True, slots=True)
class SequenceFailure:
    """One sequence's failure in a step; the others of the step are sound."""

    handle: int
    message: str


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest next tokens of a beam, best first, equal ones by the lower token id."""

    handle: int
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    """Natural logarithms of the softmax of the logits, at most 0."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave: `token_ids[i]` was sampled for `handles[i]`.

    Handles come in the plan's order: decodes, then chunks that sample; a failed one is left out.
    Beams are in `candidates` instead, in the same order.
    """

    step: int
    handles: Sequence[int]
    token_ids: Sequence[int]
    failures: Sequence[SequenceFailure] = field(default=())
    execute_s: float = 0.0
    candidates: Sequence[Candidates] = ()
    logprobs: LogprobRows = NO_LOGPROBS
    """Of the sampled tokens, one place for each sequence that asked, in the order of `handles`."""
    prompt_logprobs: LogprobRows = NO_LOGPROBS
    """Of prompts' tokens, in the order of the plan's chunks."""
