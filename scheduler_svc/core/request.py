"""What the scheduler knows of a request and of each of its sequences."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from scheduler_svc.core.beam_group import BeamGroup
from scheduler_svc.core.constraint import TokenConstraint
from scheduler_svc.core.messages import NewRequest, SequenceRef
from scheduler_svc.core.policy import OrderKey
from scheduler_svc.core.prefix_index import Parent
from scheduler_svc.core.states import SequenceState, check_transition
from shared.ids import ReplicaId, RequestId


@dataclass(slots=True, eq=False)
class Request:
    """A client's request: its fixed part, and what all its sequences share."""

    new: NewRequest
    arrival_s: float
    arrival_number: int
    start_by_s: float | None
    """The end of its queue timeout."""
    end_by_s: float | None
    """The time after which nobody waits for it."""
    sequences: list[Sequence] = field(default_factory=list)
    is_started: bool = False
    num_held: int = 0
    """Waiting sequences that no replica may take by themselves: choices whose first sibling
    computes the prompt they share, and those that beams are forked into."""
    beams: BeamGroup | None = None
    """Of a beam search, while it runs."""
    num_losses: int = 0
    """Replicas lost while it ran there."""
    is_unsound: bool = False
    """A worker failed one of its sequences: what its blocks hold is not to be trusted."""

    @property
    def id(self) -> RequestId:
        return self.new.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.new.prompt_token_ids)

    @property
    def is_finished(self) -> bool:
        return all(seq.state is SequenceState.FINISHED for seq in self.sequences)


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice or beam of a request.

    While it runs, `token_ids` has its first tokens alone, those that it started with at least, and
    the others are in its row of the replica's SequenceTable; in every other state it is complete.
    """

    request: Request
    index: int
    key: OrderKey
    ref: SequenceRef
    token_ids: array[int]
    """The prompt, then what was generated; 32 bits each."""
    constraint: TokenConstraint | None = None
    """As of all tokens that are back."""
    state: SequenceState = SequenceState.WAITING
    replica: ReplicaId | None = None
    """Where it is RUNNING or SWAPPED."""
    row: int = -1
    """While RUNNING: its handle and row there."""
    block_table: list[int] = field(default_factory=list)
    """While RUNNING: device blocks, one reference each."""
    host_blocks: list[int] = field(default_factory=list)
    """While SWAPPED: host blocks."""
    num_swapped_tokens: int = 0
    """While SWAPPED: tokens whose keys and values the host blocks hold."""
    swap_step: int = 0
    """While SWAPPED: the step that copies to the host blocks."""
    num_published_blocks: int = 0
    """Leading blocks of the table that were offered to the prefix index."""
    parent: Parent = b""
    """What the next published block comes after; held in the index while RUNNING."""
    digests: list[bytes] = field(default_factory=list)
    """Digests of the leading blocks, as far as they were needed."""
    digest_block_size: int = 0
    num_scored: int = 1
    """Places of the prompt whose log-probabilities are given; the first one has none."""
    num_preemptions: int = 0
    chunk_sizes: list[int] = field(default_factory=list)
    """While its prompt is computed in several steps: the tokens of each."""
    num_deferrals: int = 0
    """How often a replica left it to another one since it began to wait."""
    leaders: dict[ReplicaId, tuple[Sequence, int]] = field(default_factory=dict)
    """While WAITING: on a replica, who computes blocks that it can share, and how many that
    sequence will have published then."""

    @property
    def num_prompt_tokens(self) -> int:
        return self.request.num_prompt_tokens

    @property
    def namespace(self) -> bytes:
        """What its first block comes after in a prefix index: others' blocks are found under the
        same adapter and the same salt alone, and neither passes for the other."""
        adapter = self.request.new.adapter.encode()
        return b"%d:%b%b" % (len(adapter), adapter, self.request.new.cache_salt)

    @property
    def uses_prefix_cache(self) -> bool:
        return not self.request.new.bypass_prefix_cache

    @property
    def owes_scores(self) -> bool:
        """Whether log-probabilities of its prompt are asked for and not all given. Until they are
        it starts from no cached token: what is not computed is not told."""
        asked = self.request.new.num_prompt_logprobs
        return asked is not None and self.index == 0 and self.num_scored < self.num_prompt_tokens

    @property
    def is_running(self) -> bool:
        return self.state is SequenceState.RUNNING

    def go(self, state: SequenceState) -> None:
        """Change state; raises IllegalTransition when the table of states has no such way."""
        check_transition(self.state, state)
        self.state = state


def make_request(
    new: NewRequest, now: float, arrival_number: int, keys: SequenceOf[OrderKey]
) -> Request:
    """A request that arrives now, with one waiting sequence for each key."""
    request = Request(
        new,
        now,
        arrival_number,
        start_by_s=None if new.queue_timeout_s is None else now + new.queue_timeout_s,
        end_by_s=None if new.deadline_s is None else now + new.deadline_s,
    )
    for index, key in enumerate(keys):
        ref = SequenceRef(new.request_id, index)
        constraint = None if new.constraint is None else new.constraint.copy()
        request.sequences.append(
            Sequence(request, index, key, ref, array("I", new.prompt_token_ids), constraint)
        )
    return request
