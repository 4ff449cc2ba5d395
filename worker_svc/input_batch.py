"""Makes a step's tensors of a plan and the lasting state: tokens, positions, slots, tables.

All sequences of a step lie one after the other in one ragged batch: decodes, then chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from kernels.interface import AttentionBatch
from shared.errors import ProtocolError
from shared.plan import StepPlan
from worker_svc.request_state import RequestState, Rows


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step's inputs, and which rows of the state they stand for."""

    rows: Rows  # [num_seqs]
    num_new_tokens: Rows  # [num_seqs]
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
    num_decodes = len(plan.decode_handles)
    rows = state.rows((*plan.decode_handles, *plan.chunk_handles))
    counts = np.ones(len(rows), np.int64)
    counts[num_decodes:] = plan.chunk_num_tokens
    samples = np.ones(len(rows), np.bool_)
    samples[num_decodes:] = plan.chunk_samples
    if len(np.unique(rows)) != len(rows):
        raise ProtocolError("the plan computes a sequence twice")
    sound = ~state.is_failed[rows]
    rows, counts, samples = rows[sound], counts[sound], samples[sound]
    if not len(rows):
        return None
    _check(state, rows, counts, samples)
    is_greedy = samples & state.is_greedy(rows) & ~np.isin(rows, plan.masked_handles)
    return _assemble(state, rows, counts, samples & ~is_greedy, is_greedy, device)


def build_piece(
    state: RequestState, row: int, num_new_tokens: int, device: torch.device
) -> InputBatch:
    """The next tokens of one sequence alone, with the logits of each; raises ProtocolError as
    `build_batch` does."""
    rows, counts = np.array([row]), np.array([num_new_tokens])
    samples = np.zeros(1, np.bool_)
    _check(state, rows, counts, samples)
    piece = _assemble(state, rows, counts, samples, samples, device)
    return replace(piece, logit_rows=torch.arange(num_new_tokens, device=device))


def _check(state: RequestState, rows: Rows, counts: Rows, samples: npt.NDArray[np.bool_]) -> None:
    ends = state.num_computed[rows] + counts
    num_tokens = state.num_tokens[rows]
    wrong = (
        (ends > num_tokens)
        | (ends > state.num_blocks[rows] * state.block_size)
        | (ends > state.context_length)
        | (samples & (ends != num_tokens))
    )
    if wrong.any():
        row = int(rows[wrong][0])
        raise ProtocolError(
            f"the plan computes tokens {state.num_computed[row]} to {ends[wrong][0]} of sequence "
            f"{row}, which has {state.num_tokens[row]} tokens and {state.num_blocks[row]} blocks"
        )


def _assemble(
    state: RequestState,
    rows: Rows,
    counts: Rows,
    samples: npt.NDArray[np.bool_],
    is_greedy: npt.NDArray[np.bool_],
    device: torch.device,
) -> InputBatch:
    starts = state.num_computed[rows]
    seq_lens = starts + counts
    query_start = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    last_tokens = query_start[1:].astype(np.int64) - 1
    row_of_token = np.repeat(rows, counts)  # [num_tokens]
    # A token's position: where its sequence starts, plus how far it is into the sequence's rows.
    positions = np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], counts)
    block_size = state.block_size
    blocks = state.block_tables[row_of_token, positions // block_size].astype(np.int64)
    max_blocks = -(-int(seq_lens.max()) // block_size)
    attention = AttentionBatch(
        query_start=_tensor(query_start, device),
        seq_lens=_tensor(seq_lens.astype(np.int32), device),
        block_tables=_tensor(state.block_tables[rows, :max_blocks], device),
        slots=_tensor(blocks * block_size + positions % block_size, device),
        positions=_tensor(positions, device),
        max_query_len=int(counts.max()),
        max_seq_len=int(seq_lens.max()),
    )
    return InputBatch(
        rows=rows,
        num_new_tokens=counts,
        sampling_rows=rows[samples],
        greedy_rows=rows[is_greedy],
        token_ids=_tensor(state.tokens[row_of_token, positions].astype(np.int64), device),
        attention=attention,
        logit_rows=_tensor(last_tokens[samples], device),
        greedy_logit_rows=_tensor(last_tokens[is_greedy], device),
    )


def _tensor(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
