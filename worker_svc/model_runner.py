"""One step from plan to result: state, cache moves, forward pass, draw, state again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch

from kernels.decoder import Decoder
from shared.errors import ProtocolError
from shared.plan import Candidates, SequenceFailure, StepPlan, StepResult
from worker_svc.candidates import top_candidates
from worker_svc.input_batch import InputBatch, build_batch
from worker_svc.kv_cache import KvCache
from worker_svc.request_state import RequestState, Rows
from worker_svc.sampler import sample
from worker_svc.token_masks import apply_masks, check_masks


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a forward pass gave."""

    handles: list[int] = field(default_factory=list)
    """Sequences that sampled."""
    token_ids: list[int] = field(default_factory=list)
    candidates: list[Candidates] = field(default_factory=list)
    unsound: list[int] = field(default_factory=list)
    """Sequences whose logits are no numbers to choose by."""


class ModelRunner:
    """Owns the state of the sequences; runs plans in the order in which they are given."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KvCache,
        state: RequestState,
        *,
        device: torch.device,
        max_num_batched_tokens: int,
        max_num_seqs: int,
    ) -> None:
        self.decoder = decoder
        self.cache = cache
        self.state = state
        self.device = device
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs

    def fits(self, plan: StepPlan) -> bool:
        """Whether `plan` follows the last step applied, or starts afresh."""
        return plan.reset or plan.base_step == self.state.step

    def execute(self, plan: StepPlan) -> StepResult:
        """Apply `plan`, which `fits`, and compute its tokens.

        A sequence whose logits are unsound fails by itself, in this step and in any later one that
        was planned before the scheduler knew. Raises ProtocolError for a plan that the state
        contradicts; the state is then not to be trusted.
        """
        started_s = time.perf_counter()
        self._check_limits(plan)
        self.state.apply(plan)
        self.cache.run(plan.cache_ops)
        failed = self._failed_earlier(plan)
        batch = build_batch(self.state, plan, self.device)
        check_masks(plan, self.state.vocab_size)
        outcome = _Outcome() if batch is None else self._compute(batch, plan)
        failed.extend(SequenceFailure(row, "its logits are not finite") for row in outcome.unsound)
        return StepResult(
            step=plan.step,
            handles=outcome.handles,
            token_ids=outcome.token_ids,
            failures=failed,
            execute_s=time.perf_counter() - started_s,
            candidates=outcome.candidates,
        )

    def _check_limits(self, plan: StepPlan) -> None:
        num_seqs = len(plan.decode_handles) + len(plan.chunk_handles)
        if plan.num_tokens > self._max_num_batched_tokens or num_seqs > self._max_num_seqs:
            raise ProtocolError(
                f"the plan computes {plan.num_tokens} tokens of {num_seqs} sequences; the limits "
                f"are {self._max_num_batched_tokens} and {self._max_num_seqs}"
            )

    def _failed_earlier(self, plan: StepPlan) -> list[SequenceFailure]:
        rows = self.state.rows((*plan.decode_handles, *plan.chunk_handles))
        failed = rows[self.state.is_failed[rows]].tolist()
        return [SequenceFailure(row, "it failed in an earlier step") for row in failed]

    def _compute(self, batch: InputBatch, plan: StepPlan) -> _Outcome:
        logits = self.decoder.forward(
            batch.token_ids, batch.attention, self.cache.device_blocks, batch.logit_rows
        )
        state, rows = self.state, batch.sampling_rows
        state.advance(batch.rows, batch.num_new_tokens)
        if not len(rows):
            return _Outcome()
        with torch.inference_mode():
            if plan.masks:
                apply_masks(logits, rows, plan)
            sampled = sample(logits, state.sampling_rows(rows))
            is_beam = state.num_candidates[rows] > 0
            beams = np.flatnonzero(is_beam & sampled.is_sound)
            candidates = self._candidates(logits, rows, beams) if len(beams) else []
        drawn = sampled.is_sound & ~is_beam
        token_ids = sampled.token_ids[drawn]
        state.append_tokens(rows[drawn], token_ids)
        unsound = rows[~sampled.is_sound]
        state.is_failed[unsound] = True
        return _Outcome(
            rows[drawn].tolist(), token_ids.tolist(), candidates, np.unique(unsound).tolist()
        )

    def _candidates(self, logits: torch.Tensor, rows: Rows, beams: Rows) -> list[Candidates]:
        """Of the sampling `rows`, those at the places `beams`."""
        picked = torch.from_numpy(beams).to(logits.device)
        handles = rows[beams]
        counts = self.state.num_candidates[handles].tolist()
        return top_candidates(logits[picked], handles.tolist(), counts)
