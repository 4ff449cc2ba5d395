"""Makes a step's tensors of a plan and the lasting state: tokens, positions, slots, tables.

All sequences of a step lie one after the other in one ragged batch: decodes, then chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, compress

import numpy as np
import numpy.typing as npt
import torch

from kernels.interface import AttentionBatch
from shared.errors import ProtocolError
from shared.plan import StepPlan
from worker_svc.request_state import RequestState, Rows

Bools = npt.NDArray[np.bool_]
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step's inputs, and which rows of the state they stand for."""

    rows: Rows  # [num_seqs]
    ends: Rows  # [num_seqs], how many of their tokens are computed after the step
    sampling_rows: Rows  # [n], the rows that sample by their logits
    greedy_rows: Rows  # [m], the rows that sample their likeliest token and need no logits
    token_ids: torch.Tensor  # [num_tokens] int64
    attention: AttentionBatch
    logit_rows: torch.Tensor  # [n] int64, the last tokens of the sampling rows
    greedy_logit_rows: torch.Tensor  # [m] int64, of the greedy rows


def build_batch(state: RequestState, plan: StepPlan, device: torch.device) -> InputBatch | None:
    """The batch of `plan`'s sound sequences; None when there are none.

    Raises ProtocolError when a sequence is unknown, is there twice, computes tokens that it does
    not have or has no block for, or samples before its last token.
    """
    handles = (*plan.decode_handles, *plan.chunk_handles)
    rows = state.rows(handles)
    if len(set(handles)) != len(handles):
        raise ProtocolError("the plan computes a sequence twice")
    num_decodes = len(plan.decode_handles)
    counts = [1] * num_decodes + [*plan.chunk_num_tokens]
    samples = np.array([True] * num_decodes + [*plan.chunk_samples], np.bool_)
    if not state.failed.isdisjoint(handles):
        sound = [handle not in state.failed for handle in handles]
        rows, counts, samples = rows[sound], [*compress(counts, sound)], samples[sound]
    if not counts:
        return None
    is_greedy = samples & state.is_greedy[rows]
    if plan.masks:
        is_greedy &= ~np.isin(rows, plan.masked_handles)
    return _assemble(state, rows, counts, samples, is_greedy, device)


def build_piece(
    state: RequestState, row: int, num_new_tokens: int, device: torch.device
) -> InputBatch:
    """The next tokens of one sequence alone, with the logits of each; raises ProtocolError as
    `build_batch` does."""
    nothing = np.zeros(1, np.bool_)
    piece = _assemble(state, np.array([row]), [num_new_tokens], nothing, nothing, device)
    return replace(piece, logit_rows=torch.arange(num_new_tokens, device=device))


def _assemble(
    state: RequestState,
    rows: Rows,
    counts: Sequence[int],
    samples: Bools,
    is_greedy: Bools,
    device: torch.device,
) -> InputBatch:
    """The batch of the next `counts` tokens, at least one, of `rows`; raises ProtocolError."""
    starts = state.num_computed[rows]
    ends = starts + counts
    _check(state, rows, ends, samples)
    max_query_len, max_seq_len = max(counts), max(ends.tolist())
    query_start = np.array([0, *accumulate(counts)], np.int32)
    row_of_token, positions = rows, starts
    if max_query_len > 1:
        row_of_token = rows.repeat(counts)  # [num_tokens]
        # Where its sequence starts, plus how far a token is into the rows of its sequence.
        positions = np.arange(len(row_of_token)) + (starts - query_start[:-1]).repeat(counts)
    block_size = state.block_size
    columns = positions // block_size
    blocks = state.block_tables[row_of_token, columns]
    max_blocks = -(-max_seq_len // block_size)
    attention = AttentionBatch(
        query_start=_tensor(query_start, device),
        seq_lens=_tensor(ends.astype(np.int32), device),
        block_tables=_tensor(state.block_tables[rows, :max_blocks], device),
        slots=_tensor(positions + (blocks - columns) * block_size, device),
        positions=_tensor(positions, device),
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
    )
    last_tokens = query_start[1:].astype(np.int64) - 1
    sampling = samples & ~is_greedy
    return InputBatch(
        rows=rows,
        ends=ends,
        sampling_rows=rows[sampling],
        greedy_rows=rows[is_greedy],
        token_ids=_tensor(state.tokens[row_of_token, positions].astype(np.int64), device),
        attention=attention,
        logit_rows=_tensor(last_tokens[sampling], device),
        greedy_logit_rows=_tensor(last_tokens[is_greedy], device),
    )


def _check(state: RequestState, rows: Rows, ends: Rows, samples: Bools) -> None:
    num_tokens = state.num_tokens[rows]
    wrong = (
        (ends > num_tokens)
        | (ends > state.num_blocks[rows] * state.block_size)
        | (ends > state.context_length)
        | (samples & (ends != num_tokens))
    )
    if any(wrong.tolist()):
        row = int(rows[wrong][0])
        raise ProtocolError(
            f"the plan computes tokens {state.num_computed[row]} to {ends[wrong][0]} of sequence "
            f"{row}, which has {state.num_tokens[row]} tokens and {state.num_blocks[row]} blocks"
        )


def _tensor(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device == CPU else tensor.to(device)
