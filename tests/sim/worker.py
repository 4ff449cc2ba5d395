"""A worker that applies plans as a real one does, on blocks whose slots hold prefix states.

It trusts nothing: a plan that names an unknown handle, reads an unwritten slot or a block that
another sequence of the step writes, or writes outside a table is an AssertionError. A wrong block,
a lost or a doubled token changes what it reads, and so the tokens it draws.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shared.logprobs import Logprobs
from shared.plan import (
    CacheOpKind,
    Candidates,
    Fork,
    SequenceFailure,
    SequenceStart,
    StepPlan,
    StepResult,
    TokenMask,
)
from tests.sim.model import ROOT, candidates, draw, extend
from tests.told import rows_of, told_of

RUBBISH = -7
POISON = -8
"""As a NaN in a cache: what is computed of it is poison too, and who samples of it fails."""


@dataclass(slots=True)
class WorkerSequence:
    """A sequence as the worker keeps it."""

    start: SequenceStart
    token_ids: list[int]
    num_computed: int
    block_table: list[int]
    seed: int
    index: int
    num_candidates: int


class SimWorker:
    """Blocks and sequences of one replica; `step` is the last one applied."""

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.step = 0
        self.sequences: dict[int, WorkerSequence] = {}
        self._broken: set[int] = set()
        self._device = self._empty(num_blocks)
        self._host = self._empty(num_host_blocks)

    def _empty(self, num_blocks: int) -> list[list[int | None]]:
        return [[None] * self.block_size for _ in range(num_blocks)]

    def apply(
        self,
        plan: StepPlan,
        failing: frozenset[int] = frozenset(),
        poisoned: frozenset[int] = frozenset(),
    ) -> StepResult:
        """Runs a plan whose base is this worker's step; `failing` handles fail in it, and in every
        plan after it until they leave. What `poisoned` handles compute is poison, and so is all
        that is computed of it; whoever is to sample of it fails."""
        assert plan.base_step == self.step, "a plan on another base"
        self.step = plan.step
        self._enter(plan)
        for op in plan.cache_ops:
            self._move(op.kind, list(op.source_blocks), list(op.target_blocks))
        rows = [*plan.decode_handles, *plan.chunk_handles]
        assert len(set(rows)) == len(rows), "a sequence is twice in a plan"
        work = [(handle, 1, True) for handle in plan.decode_handles]
        work += zip(plan.chunk_handles, plan.chunk_num_tokens, plan.chunk_samples, strict=True)
        self._check_apart({handle: num_new for handle, num_new, _ in work})
        self._broken |= failing
        failed = [handle for handle, _, _ in work if handle in self._broken]
        for handle, num_new, _ in work:
            if handle in self._broken:
                self._spoil(handle, num_new)
        masks = dict(zip(plan.masked_handles, plan.masks, strict=True))
        handles, token_ids, found = [], [], []
        told, told_prompts = {}, {}
        for handle, num_new, samples in work:
            if handle in self._broken:
                continue
            if scores := self._scores(handle, num_new):
                told_prompts[handle] = scores
            if not self._compute(handle, num_new, samples, is_poisoned=handle in poisoned):
                continue
            if self._states(self.sequences[handle])[-1] == POISON:
                self._broken.add(handle)
                failed.append(handle)
                told_prompts.pop(handle, None)
            elif self.sequences[handle].num_candidates:
                found.append(self._candidates(handle))
            else:
                handles.append(handle)
                token_ids.append(self._draw(handle, masks.get(handle)))
                seq = self.sequences[handle]
                if (num_top := seq.start.sampling.num_logprobs) is not None:
                    last = len(seq.token_ids) - 1
                    told[handle] = told_of(seq.token_ids, range(last, last + 1), num_top)
        return StepResult(
            step=plan.step,
            handles=handles,
            token_ids=token_ids,
            failures=tuple(SequenceFailure(handle, "it failed") for handle in failed),
            candidates=found,
            logprobs=rows_of(told),
            prompt_logprobs=rows_of(told_prompts),
        )

    def _scores(self, handle: int, num_new: int) -> Logprobs | None:
        """What computing the next `num_new` tokens tells of the prompt."""
        seq = self.sequences[handle]
        num_top = seq.start.num_prompt_logprobs
        if num_top is None:
            return None
        first = max(seq.num_computed + 1, seq.start.first_prompt_logprob)
        places = range(first, min(seq.num_computed + num_new + 1, seq.start.num_prompt_tokens))
        return told_of(seq.token_ids, places, num_top) if places else None

    def _enter(self, plan: StepPlan) -> None:
        if plan.reset:
            self.sequences.clear()
            self._broken.clear()
        for handle in plan.finished_handles:
            del self.sequences[handle]
            self._broken.discard(handle)
        for start in plan.starts:
            assert start.handle not in self.sequences, "a handle is given twice"
            self.sequences[start.handle] = self._start(start)
        forked = {fork.handle: self._fork(fork) for fork in plan.forks}
        assert len(forked) == len(plan.forks), "a handle is forked twice"
        self.sequences.update(forked)
        for handle, token in zip(plan.chosen_handles, plan.chosen_token_ids, strict=True):
            assert self.sequences[handle].num_candidates, "a token is chosen for it"
            self.sequences[handle].token_ids.append(token)
        for handle, block in zip(plan.append_handles, plan.append_blocks, strict=True):
            self.sequences[handle].block_table.append(block)

    def _start(self, start: SequenceStart) -> WorkerSequence:
        assert 0 <= start.num_computed_tokens < len(start.token_ids)
        return WorkerSequence(
            start,
            list(start.token_ids),
            start.num_computed_tokens,
            list(start.block_table),
            start.sampling.seed,
            start.sequence_index,
            start.num_candidates,
        )

    def _fork(self, fork: Fork) -> WorkerSequence:
        assert fork.handle not in self.sequences, "a handle is given twice"
        source = self.sequences[fork.source]
        assert source.num_candidates and source.num_computed == len(source.token_ids)
        shared = source.block_table[: source.num_computed // self.block_size]
        table = [*shared, fork.block]
        return replace(source, token_ids=list(source.token_ids), block_table=table)

    def _move(self, kind: CacheOpKind, sources: list[int], targets: list[int]) -> None:
        assert len(set(targets)) == len(targets) == len(sources)
        source_pool = self._host if kind is CacheOpKind.SWAP_IN else self._device
        target_pool = self._host if kind is CacheOpKind.SWAP_OUT else self._device
        assert source_pool is not target_pool or not set(sources) & set(targets)
        for source, target in zip(sources, targets, strict=True):
            target_pool[target] = list(source_pool[source])

    def _check_apart(self, num_new_of: dict[int, int]) -> None:
        """Sequences of a step may be computed in any order, so none reads what another writes."""
        writers: dict[int, int] = {}
        for handle, num_new in num_new_of.items():
            seq = self.sequences[handle]
            first, last = seq.num_computed, seq.num_computed + num_new - 1
            for block in seq.block_table[first // self.block_size : last // self.block_size + 1]:
                assert writers.setdefault(block, handle) == handle, "two write to a block"
        for handle, num_new in num_new_of.items():
            seq = self.sequences[handle]
            last = seq.num_computed + num_new - 1
            for block in seq.block_table[: last // self.block_size + 1]:
                assert writers.get(block, handle) == handle, "a block is read that another writes"

    def _compute(self, handle: int, num_new: int, samples: bool, *, is_poisoned: bool) -> bool:
        """Fill the slots of `num_new` tokens; whether the next token is due."""
        seq = self.sequences[handle]
        for position in range(seq.num_computed, seq.num_computed + num_new):
            block = self._device[seq.block_table[position // self.block_size]]
            before = self._read(seq, position - 1)
            is_poison = is_poisoned or before == POISON
            state = POISON if is_poison else extend(before, seq.token_ids[position])
            block[position % self.block_size] = state
        seq.num_computed += num_new
        assert samples == (seq.num_computed == len(seq.token_ids)), "samples in the middle"
        return samples

    def _draw(self, handle: int, mask: TokenMask | None) -> int:
        seq = self.sequences[handle]
        allowed = None if mask is None else mask.token_ids
        token = draw(self._states(seq), seq.seed, seq.index, len(seq.token_ids), allowed)
        seq.token_ids.append(token)
        return token

    def _candidates(self, handle: int) -> Candidates:
        seq = self.sequences[handle]
        return Candidates(handle, *candidates(self._states(seq), seq.num_candidates))

    def _states(self, seq: WorkerSequence) -> list[int]:
        """What attention reads."""
        ends = range(self.block_size - 1, seq.num_computed - 1, self.block_size)
        return [self._read(seq, position) for position in (*ends, seq.num_computed - 1)]

    def _spoil(self, handle: int, num_new: int) -> None:
        """A failed sequence leaves rubbish where its tokens were to go."""
        seq = self.sequences[handle]
        for position in range(seq.num_computed, seq.num_computed + num_new):
            block = self._device[seq.block_table[position // self.block_size]]
            block[position % self.block_size] = RUBBISH
        seq.num_computed += num_new

    def _read(self, seq: WorkerSequence, position: int) -> int:
        if position < 0:
            return ROOT
        block = self._device[seq.block_table[position // self.block_size]]
        state = block[position % self.block_size]
        assert state is not None, "a slot is read that nobody wrote"
        return state
