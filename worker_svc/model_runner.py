"""One step from plan to result: state, cache moves, forward pass, draw, state again."""

from __future__ import annotations

import time

import numpy as np
import torch

from kernels.decoder import Decoder
from shared.errors import ProtocolError
from shared.plan import SequenceFailure, StepPlan, StepResult
from worker_svc.input_batch import InputBatch, build_batch
from worker_svc.kv_cache import KvCache
from worker_svc.request_state import RequestState
from worker_svc.sampler import sample


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
        handles: list[int] = []
        token_ids: list[int] = []
        if batch is not None:
            handles, token_ids, unsound = self._compute(batch)
            failed.extend(SequenceFailure(row, "its logits are not finite") for row in unsound)
        return StepResult(
            step=plan.step,
            handles=handles,
            token_ids=token_ids,
            failures=failed,
            execute_s=time.perf_counter() - started_s,
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

    def _compute(self, batch: InputBatch) -> tuple[list[int], list[int], list[int]]:
        """Rows that sampled, their tokens, and rows whose logits are unsound."""
        logits = self.decoder.forward(
            batch.token_ids, batch.attention, self.cache.device_blocks, batch.logit_rows
        )
        self.state.advance(batch.rows, batch.num_new_tokens)
        rows = batch.sampling_rows
        if not len(rows):
            return [], [], []
        with torch.inference_mode():
            sampled = sample(logits, self.state.sampling_rows(rows))
        sound, unsound = rows[sampled.is_sound], rows[~sampled.is_sound]
        token_ids = sampled.token_ids[sampled.is_sound]
        self.state.append_tokens(sound, token_ids)
        self.state.is_failed[unsound] = True
        return sound.tolist(), token_ids.tolist(), np.unique(unsound).tolist()
