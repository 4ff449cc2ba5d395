"""One step from plan to result: state, cache moves, forward pass, draw, state again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kernels.decoder import Decoder, StepLogits
from kernels.logits import Drawn, LogitKernels
from shared.errors import ProtocolError
from shared.plan import Candidates, SequenceFailure, StepPlan, StepResult
from worker_svc.candidates import top_candidates
from worker_svc.input_batch import InputBatch, build_batch
from worker_svc.kv_cache import KvCache
from worker_svc.logit_rules import apply_rules
from worker_svc.logprobs import PlaceLogprobs, flat_rows
from worker_svc.prompt_logprobs import tell_prompts
from worker_svc.request_state import RequestState, Rows
from worker_svc.sampler import sample
from worker_svc.token_masks import apply_masks, check_masks

NOT_FINITE = "its logits are not finite"
NOTHING_LEFT = "its constraint and its token lists leave no token to draw"


@dataclass(slots=True)
class _Outcome:
    """What a forward pass gave."""

    token_ids: dict[int, int] = field(default_factory=dict)
    """What sequences drew, in the plan's order."""
    candidates: list[Candidates] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    """Why sequences have no token."""
    logprobs: dict[int, PlaceLogprobs] = field(default_factory=dict)
    """Of those sampled tokens of which they are wanted."""


class ModelRunner:
    """Owns the state of the sequences; runs plans in the order in which they are given."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KvCache,
        state: RequestState,
        logit_kernels: LogitKernels,
        *,
        device: torch.device,
        max_num_batched_tokens: int,
        max_num_seqs: int,
    ) -> None:
        self.decoder = decoder
        self.cache = cache
        self.state = state
        self._logit_kernels = logit_kernels
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
        check_masks(plan, self.state.vocab_size)
        self.state.apply(plan)
        self.cache.run(plan.cache_ops)
        failed = self._failed_earlier(plan)
        prompts: dict[int, PlaceLogprobs] = {}
        unsound: list[int] = []
        if plan.chunk_handles and self._tells_prompts(plan):
            with torch.inference_mode():
                plan, prompts, unsound = tell_prompts(
                    self.state, plan, lambda batch: self._forward(batch).logits, self.device
                )
        batch = build_batch(self.state, plan, self.device)
        outcome = _Outcome() if batch is None else self._compute(batch, plan)
        for row in outcome.failures:
            prompts.pop(row, None)
        reasons = {**dict.fromkeys(unsound, NOT_FINITE), **outcome.failures}
        failed += [SequenceFailure(row, reason) for row, reason in reasons.items()]
        return StepResult(
            step=plan.step,
            handles=list(outcome.token_ids),
            token_ids=list(outcome.token_ids.values()),
            failures=failed,
            execute_s=time.perf_counter() - started_s,
            candidates=outcome.candidates,
            logprobs=flat_rows(outcome.logprobs),
            prompt_logprobs=flat_rows(prompts),
        )

    def _check_limits(self, plan: StepPlan) -> None:
        num_seqs = len(plan.decode_handles) + len(plan.chunk_handles)
        if plan.num_tokens > self._max_num_batched_tokens or num_seqs > self._max_num_seqs:
            raise ProtocolError(
                f"the plan computes {plan.num_tokens} tokens of {num_seqs} sequences; the limits "
                f"are {self._max_num_batched_tokens} and {self._max_num_seqs}"
            )

    def _failed_earlier(self, plan: StepPlan) -> list[SequenceFailure]:
        failed = self.state.failed
        if not failed:
            return []
        handles = (*plan.decode_handles, *plan.chunk_handles)
        return [SequenceFailure(h, "it failed in an earlier step") for h in handles if h in failed]

    def _tells_prompts(self, plan: StepPlan) -> bool:
        rows = self.state.rows(plan.chunk_handles)
        return bool(self.state.num_prompt_logprobs[rows].any())

    def _forward(self, batch: InputBatch) -> StepLogits:
        return self.decoder.forward(
            batch.token_ids,
            batch.attention,
            self.cache.device_blocks,
            batch.logit_rows,
            batch.greedy_logit_rows,
        )

    def _compute(self, batch: InputBatch, plan: StepPlan) -> _Outcome:
        step = self._forward(batch)
        self.state.advance(batch.rows, batch.ends)
        outcome = _Outcome()
        if len(batch.greedy_rows):
            self._take(outcome, batch.greedy_rows, step.greedy, step.greedy.is_sound)
        if len(batch.sampling_rows):
            self._sample(outcome, batch.sampling_rows, step.logits, plan)
        if len(batch.greedy_rows) and len(batch.sampling_rows):
            drawn = outcome.token_ids
            outcome.token_ids = {row: drawn[row] for row in batch.rows.tolist() if row in drawn}
        return outcome

    def _sample(self, outcome: _Outcome, rows: Rows, logits: torch.Tensor, plan: StepPlan) -> None:
        """Draw a token of each of `rows` from its `logits`, or its candidates."""
        state, kernels = self.state, self._logit_kernels
        with torch.inference_mode():
            telling = np.flatnonzero(state.num_logprobs[rows])
            own = logits[torch.from_numpy(telling).to(logits.device)]  # before the rules
            places, rules = state.rules(rows)
            if places:
                apply_rules(logits, places, rules, kernels)
            if plan.masks:
                apply_masks(logits, rows, plan, kernels)
            sampled = sample(logits, state.sampling_rows(rows), kernels)
            if len(telling):
                outcome.logprobs.update(self._logprobs(rows, telling, own, sampled))
            beams = np.flatnonzero((state.num_candidates[rows] > 0) & sampled.is_sound)
            if len(beams):
                outcome.candidates.extend(self._candidates(logits, rows, beams))
        self._take(outcome, rows, sampled, sampled.is_sound & (state.num_candidates[rows] == 0))

    def _take(
        self, outcome: _Outcome, rows: Rows, sampled: Drawn, is_drawn: npt.NDArray[np.bool_]
    ) -> None:
        """Note what `rows` drew, and why some drew nothing. A beam's token is not drawn: it is the
        scheduler's to choose."""
        token_ids = sampled.token_ids
        if not all(is_drawn.tolist()):
            self._fail(outcome, rows, sampled)
            rows, token_ids = rows[is_drawn], token_ids[is_drawn]
        self.state.append_tokens(rows, token_ids)
        outcome.token_ids.update(zip(rows.tolist(), token_ids.tolist(), strict=True))

    def _fail(self, outcome: _Outcome, rows: Rows, sampled: Drawn) -> None:
        for place in np.flatnonzero(~sampled.is_sound):
            row = int(rows[place])
            self.state.failed.add(row)
            outcome.failures[row] = NOTHING_LEFT if sampled.is_empty[place] else NOT_FINITE

    def _logprobs(
        self, rows: Rows, telling: Rows, own_logits: torch.Tensor, sampled: Drawn
    ) -> dict[int, PlaceLogprobs]:
        """What is told of the tokens that the sampling `rows` at the places `telling` [m] drew, by
        their own logits [m, vocab_size]. A row with a NaN among these is not sound."""
        sampled.is_sound[telling] &= own_logits.amax(dim=-1).isfinite().cpu().numpy()
        told = {}
        for place, logits in zip(telling.tolist(), own_logits, strict=True):
            if sampled.is_sound[place]:
                row = int(rows[place])
                num_top = int(self.state.num_logprobs[row]) - 1
                told[row] = places = PlaceLogprobs(min(num_top, self.state.vocab_size))
                places.add(logits[None], [int(sampled.token_ids[place])])
        return told

    def _candidates(self, logits: torch.Tensor, rows: Rows, beams: Rows) -> list[Candidates]:
        """Of the sampling `rows`, those at the places `beams`."""
        picked = torch.from_numpy(beams).to(logits.device)
        handles = rows[beams]
        counts = self.state.num_candidates[handles].tolist()
        return top_candidates(logits[picked], handles.tolist(), counts)
