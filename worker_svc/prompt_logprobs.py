"""Log-probabilities of prompts' tokens, as a step's chunks come to them.

The logits at a place tell of the token after it. A chunk of a sequence that wants them is split:

    chunk    | start ........................ | ............ end |
             |-- head: before the last token  |-- rest ----------|
                 of the prompt

The head is computed before the step's batch, alone and in pieces, so that the logits of all its
tokens take bounded memory; the rest stays in the batch. Where all of a head is told already, as
after a preemption, nothing is split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from shared.plan import StepPlan
from worker_svc.input_batch import InputBatch, build_piece
from worker_svc.logprobs import PlaceLogprobs
from worker_svc.request_state import RequestState

MAX_LOGITS_BYTES = 64 << 20
"""Of one piece."""

Forward = Callable[[InputBatch], torch.Tensor]


def tell_prompts(
    state: RequestState, plan: StepPlan, forward: Forward, device: torch.device
) -> tuple[StepPlan, dict[int, PlaceLogprobs], list[int]]:
    """Compute the heads of the chunks of `plan`. Gives the plan of the rests, what is told of each
    sequence, and the sequences that failed, as their logits are not finite."""
    sizes = list(plan.chunk_num_tokens)
    told: dict[int, PlaceLogprobs] = {}
    failed: list[int] = []
    for index, row in enumerate(state.rows(plan.chunk_handles).tolist()):
        size = _head_size(state, row, sizes[index])
        if not size:
            continue
        sizes[index] -= size
        places = PlaceLogprobs(min(int(state.num_prompt_logprobs[row]) - 1, state.vocab_size))
        if _tell(state, row, size, places, forward, device):
            told[row] = places
        else:
            state.failed.add(row)
            failed.append(row)
    if not told and not failed:
        return plan, told, failed
    kept = [index for index, size in enumerate(sizes) if size]
    rest = replace(
        plan,
        chunk_handles=[plan.chunk_handles[index] for index in kept],
        chunk_num_tokens=[sizes[index] for index in kept],
        chunk_samples=[plan.chunk_samples[index] for index in kept],
    )
    return rest, told, failed


def _head_size(state: RequestState, row: int, num_new_tokens: int) -> int:
    """How many tokens the head of a chunk has; 0 where nothing of it is to be told."""
    if not state.num_prompt_logprobs[row] or row in state.failed:
        return 0
    start = int(state.num_computed[row])
    end = min(start + num_new_tokens, int(state.num_prompt_tokens[row]) - 1)
    return end - start if end >= max(start + 1, state.first_prompt_logprob[row]) else 0


def _tell(
    state: RequestState,
    row: int,
    size: int,
    places: PlaceLogprobs,
    forward: Forward,
    device: torch.device,
) -> bool:
    """Compute the next `size` tokens of `row`; whether all their logits are numbers."""
    first_wanted = int(state.first_prompt_logprob[row])
    most = max(1, MAX_LOGITS_BYTES // (4 * state.vocab_size))
    while size:
        count = min(size, most)
        batch = build_piece(state, row, count, device)
        logits = forward(batch)
        first = int(state.num_computed[row]) + 1  # the place that the first logits tell of
        state.advance(batch.rows, batch.ends)
        if not logits.amax(dim=-1).isfinite().all():
            return False
        skipped = min(max(0, first_wanted - first), count)
        tokens = state.tokens[row, first + skipped : first + count].tolist()
        places.add(logits[skipped:], tokens)
        size -= count
    return True
