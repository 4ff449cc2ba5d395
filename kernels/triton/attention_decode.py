"""Attention of single tokens: each sequence's context is split over programs, then merged.

One token per sequence gives too few programs to fill a device when sequences are few and long
(Dao et al., "Flash-Decoding", 2023). So program (sequence, KV head, split) computes a partial
softmax over a run of positions, and a second kernel merges the runs in order.

The runs are chosen by the sequence's own length alone, never by the batch, so that a row's result
is the same bits in any company:

    run length    SPLIT_TOKENS, or the multiple of it that makes at most MAX_SPLITS runs

256 positions of a 128-wide bfloat16 head are 128 KiB of keys and values; a partial result for a
group of 4 heads is 2 KiB, so splitting costs under 2% of the traffic.
"""

# Kernels are a language of their own: Triton types their arguments at each launch.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# ruff: noqa: N803 (what is fixed at compile time stands in capitals)

import triton
import triton.language as tl

from kernels.triton.online_softmax import attend

SPLIT_TOKENS = 256
"""The shortest run of positions that a program takes; a multiple of every tiling's num_keys."""

_PROGRAMS_PER_SEQUENCE = 128
"""About the multiprocessors of a device (108 to 132): one long sequence alone keeps it busy."""

_MERGED_AT_ONCE = tl.constexpr(16)


def max_splits(num_kv_heads: int) -> int:
    """The most runs that a context is cut into; it bounds the workspace."""
    return max(1, _PROGRAMS_PER_SEQUENCE // num_kv_heads)


@triton.jit
def _run_length(seq_len, SPLIT_TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr):
    return tl.cdiv(tl.cdiv(seq_len, MAX_SPLITS), SPLIT_TOKENS) * SPLIT_TOKENS


@triton.jit(do_not_specialize=["num_splits", "stride_table"])
def decode_kernel(
    query,  # [num_tokens, num_heads, head_dim]
    keys,  # [num_blocks, num_kv_heads, block_size, head_dim], this layer's
    values,
    block_tables,  # [num_seqs, max_num_blocks] int32
    query_start,  # [num_seqs + 1] int32
    seq_lens,  # [num_seqs] int32
    partial,  # [num_seqs, num_heads, num_splits, head_dim] float32, written
    partial_max,  # [num_seqs, num_heads, num_splits] float32, written
    partial_sum,  # the same
    num_splits,
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
    SPLIT_TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Program (sequence, KV head, split); one whose sequence is no decode, or is too short to
    have that split, does nothing."""
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    token = tl.load(query_start + sequence)
    if tl.load(query_start + sequence + 1) - token != 1:
        return
    seq_len = tl.load(seq_lens + sequence)
    run = _run_length(seq_len, SPLIT_TOKENS, MAX_SPLITS)
    first = split * run
    if first >= seq_len:
        return
    last = tl.minimum(first + run, seq_len)

    rows = tl.arange(0, NUM_ROWS)
    dims = tl.arange(0, PADDED_DIM)
    heads = kv_head * GROUP + rows
    held = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    tile = tl.load(
        query
        + token.to(tl.int64) * stride_query_token
        + heads[:, None] * stride_query_head
        + dims[None, :],
        mask=held,
        other=0.0,
    ).to(COMPUTE)

    table = block_tables + sequence.to(tl.int64) * stride_table
    keys += kv_head * stride_kv_head
    values += kv_head * stride_kv_head
    row_positions = tl.full([NUM_ROWS], 0, tl.int32) + (seq_len - 1)
    whole = first + (last - first) // NUM_KEYS * NUM_KEYS
    accumulator, row_max, row_sum = attend(
        tile, row_positions, first, whole, last,
        table, keys, values, stride_block, stride_slot, scale,
        HEAD_DIM, BLOCK_SIZE, NUM_ROWS, NUM_KEYS, PADDED_DIM,
    )  # fmt: skip

    num_heads = tl.num_programs(1) * GROUP
    index = (sequence.to(tl.int64) * num_heads + heads) * num_splits + split
    tl.store(partial + index[:, None] * HEAD_DIM + dims[None, :], accumulator, mask=held)
    tl.store(partial_max + index, row_max, mask=rows < GROUP)
    tl.store(partial_sum + index, row_sum, mask=rows < GROUP)


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    partial,  # [num_seqs, num_heads, num_splits, head_dim] float32
    partial_max,  # [num_seqs, num_heads, num_splits] float32
    partial_sum,
    query_start,  # [num_seqs + 1] int32
    seq_lens,  # [num_seqs] int32
    output,  # [num_tokens, num_heads, head_dim] contiguous, written
    num_splits,
    HEAD_DIM: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Program (sequence, head) merges its runs, some at a time, in the order of positions."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    token = tl.load(query_start + sequence)
    if tl.load(query_start + sequence + 1) - token != 1:
        return
    seq_len = tl.load(seq_lens + sequence)
    num_runs = tl.cdiv(seq_len, _run_length(seq_len, SPLIT_TOKENS, MAX_SPLITS))

    dims = tl.arange(0, PADDED_DIM)
    in_head = dims < HEAD_DIM
    base = (sequence.to(tl.int64) * num_heads + head) * num_splits
    # -inf - -inf is NaN, so the maximum starts at a finite value that no score goes below.
    best = tl.max(tl.full([_MERGED_AT_ONCE], -3.0e38, tl.float32), 0)
    total = best * 0.0
    accumulator = tl.zeros([PADDED_DIM], tl.float32)
    for start in range(0, num_runs, _MERGED_AT_ONCE):
        runs = start + tl.arange(0, _MERGED_AT_ONCE)
        present = runs < num_runs
        maxima = tl.load(partial_max + base + runs, mask=present, other=float("-inf"))
        sums = tl.load(partial_sum + base + runs, mask=present, other=0.0)
        parts = tl.load(
            partial + (base + runs)[:, None] * HEAD_DIM + dims[None, :],
            mask=present[:, None] & in_head[None, :],
            other=0.0,
        )
        new_best = tl.maximum(best, tl.max(maxima, 0))
        weights = tl.exp2(maxima - new_best)
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weights * sums, 0)
        accumulator = accumulator * shrink + tl.sum(weights[:, None] * parts, 0)
        best = new_best
    row = token.to(tl.int64) * num_heads + head
    result = (accumulator / total).to(output.dtype.element_ty)
    tl.store(output + row * HEAD_DIM + dims, result, mask=in_head)
