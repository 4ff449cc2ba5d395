"""Attention of sequences with several new tokens: prompts, chunks of prompts.

Programs are laid over a ragged batch without padding and without asking the device for its shape:
sequence i gets tiles from query_start[i] // TOKENS + i on, which are at least as many as its
tokens need, and a program finds its sequence by bisection (as vLLM's unified kernel does):

    tile        0     1     2     3     4     5
    sequence    |-- 0: 5 tokens --|  1  |-- 2 ...      TOKENS = 2; surplus tiles return at once

A tile's rows are (token, query head of the group), so that each key is read once for the group.
"""

# Kernels are a language of their own: Triton types their arguments at each launch.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# ruff: noqa: N803, N806 (what is fixed at compile time stands in capitals)

import triton
import triton.language as tl

from kernels.triton.online_softmax import attend


@triton.jit
def _sequence_of_tile(tile, query_start, num_seqs, TOKENS: tl.constexpr):
    """The last sequence whose first tile is not beyond `tile`."""
    low = tile * 0
    high = low + num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        reached = tl.load(query_start + middle) // TOKENS + middle <= tile
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low


@triton.jit(do_not_specialize=["num_seqs", "stride_table"])
def prefill_kernel(
    query,  # [num_tokens, num_heads, head_dim]
    keys,  # [num_blocks, num_kv_heads, block_size, head_dim], this layer's
    values,
    block_tables,  # [num_seqs, max_num_blocks] int32
    query_start,  # [num_seqs + 1] int32
    seq_lens,  # [num_seqs] int32
    output,  # [num_tokens, num_heads, head_dim] contiguous, written
    num_seqs,
    stride_query_token,
    stride_query_head,
    stride_block,
    stride_kv_head,
    stride_slot,
    stride_table,
    scale,  # with the factor log2(e)
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Program (tile, KV head). A sequence with one new token is the decode kernel's, so that the
    way a row is computed depends on its own sequence alone."""
    TOKENS: tl.constexpr = NUM_ROWS // GROUP
    tile_index = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = _sequence_of_tile(tile_index, query_start, num_seqs, TOKENS)
    query_first = tl.load(query_start + sequence)
    query_len = tl.load(query_start + sequence + 1) - query_first
    tile_token = (tile_index - (query_first // TOKENS + sequence)) * TOKENS
    if query_len <= 1:
        return
    if tile_token >= query_len:
        return
    seq_len = tl.load(seq_lens + sequence)

    rows = tl.arange(0, NUM_ROWS)
    dims = tl.arange(0, PADDED_DIM)
    tokens = tile_token + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    # NUM_ROWS need not be a multiple of the group: the rows left over stay idle.
    held = ((rows < TOKENS * GROUP) & (tokens < query_len))[:, None] & (dims < HEAD_DIM)[None, :]
    token_rows = (query_first + tokens).to(tl.int64)
    tile = tl.load(
        query
        + token_rows[:, None] * stride_query_token
        + heads[:, None] * stride_query_head
        + dims[None, :],
        mask=held,
        other=0.0,
    ).to(COMPUTE)

    table = block_tables + sequence.to(tl.int64) * stride_table
    keys += kv_head * stride_kv_head
    values += kv_head * stride_kv_head
    # Each row sees the positions up to its own; all rows see those up to the first row's.
    first_position = seq_len - query_len + tile_token
    row_positions = seq_len - query_len + tokens
    whole = (first_position + 1) // NUM_KEYS * NUM_KEYS
    last = tl.minimum(first_position + TOKENS, seq_len)
    accumulator, _, row_sum = attend(
        tile, row_positions, 0, whole, last,
        table, keys, values, stride_block, stride_slot, scale,
        HEAD_DIM, BLOCK_SIZE, NUM_ROWS, NUM_KEYS, PADDED_DIM,
    )  # fmt: skip

    num_heads = tl.num_programs(1) * GROUP
    offsets = (token_rows * num_heads + heads)[:, None] * HEAD_DIM + dims[None, :]
    result = (accumulator / row_sum[:, None]).to(output.dtype.element_ty)
    tl.store(output + offsets, result, mask=held)
