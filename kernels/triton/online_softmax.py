"""The loop that both attention kernels share: online softmax over tiles of a sequence's context.

After Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), and Dao et al.,
"FlashAttention" (2022), algorithm 1: for each row a running maximum m, sum l and accumulator a,

    m' = max(m, max_j s_j)    l' = l e^(m - m') + sum_j e^(s_j - m')    a' likewise, times v_j

with powers of two in place of e, the logarithm's factor being in the scale.
"""

# Kernels are a language of their own: Triton types their arguments at each launch.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# ruff: noqa: N803 (what is fixed at compile time stands in capitals)

import triton
import triton.language as tl


@triton.jit
def attend(
    query,  # [NUM_ROWS, PADDED_DIM], in the type that is multiplied
    row_positions,  # [NUM_ROWS], the last position that each row sees
    first,  # positions first ..< last are attended to
    whole,  # first ..< whole is seen by every row, in tiles of NUM_KEYS
    last,
    block_table,  # pointer to the sequence's row of the block tables
    keys,  # pointer to this layer's and head's keys in block 0
    values,
    stride_block,
    stride_slot,
    scale,  # with the factor log2(e)
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Returns the accumulator [NUM_ROWS, PADDED_DIM], and each row's maximum and sum.

    Each row must see position `first`.
    """
    accumulator = tl.zeros([NUM_ROWS, PADDED_DIM], tl.float32)
    row_max = tl.full([NUM_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([NUM_ROWS], tl.float32)
    accumulator, row_max, row_sum = _attend_tiles(
        query, accumulator, row_max, row_sum, row_positions, first, whole,
        block_table, keys, values, stride_block, stride_slot, scale,
        HEAD_DIM, PADDED_DIM, BLOCK_SIZE, NUM_KEYS, MASKED=False,
    )  # fmt: skip
    return _attend_tiles(
        query, accumulator, row_max, row_sum, row_positions, whole, last,
        block_table, keys, values, stride_block, stride_slot, scale,
        HEAD_DIM, PADDED_DIM, BLOCK_SIZE, NUM_KEYS, MASKED=True,
    )  # fmt: skip


@triton.jit
def _attend_tiles(
    query,
    accumulator,
    row_max,
    row_sum,
    row_positions,
    first,
    last,
    block_table,
    keys,
    values,
    stride_block,
    stride_slot,
    scale,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Takes positions first ..< last into accumulator, row_max and row_sum; returns the three.

    Without MASKED every row must see every position, and `last - first` be a multiple of NUM_KEYS.
    With it, each row must see position `first`, or have seen an earlier one: its maximum is finite
    from then on. Slots at and beyond `last` are not read; they may hold NaN.
    """
    dims = tl.arange(0, PADDED_DIM)
    in_head = dims < HEAD_DIM
    for start in range(first, last, NUM_KEYS):
        positions = start + tl.arange(0, NUM_KEYS)
        if MASKED:
            present = positions < last
            blocks = tl.load(block_table + positions // BLOCK_SIZE, mask=present, other=0)
            loaded = present[:, None] & in_head[None, :]
        else:
            blocks = tl.load(block_table + positions // BLOCK_SIZE)
            loaded = in_head[None, :]
        # A cache may be larger than 2^31 elements.
        slots = blocks.to(tl.int64) * stride_block + positions % BLOCK_SIZE * stride_slot
        offsets = slots[:, None] + dims[None, :]  # [NUM_KEYS, PADDED_DIM]
        key = tl.load(keys + offsets, mask=loaded, other=0.0)
        value = tl.load(values + offsets, mask=loaded, other=0.0)

        # "ieee": float32 stays float32; 16-bit types go to the tensor cores either way.
        scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee") * scale
        if MASKED:
            seen = (positions[None, :] <= row_positions[:, None]) & present[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])  # [NUM_ROWS, NUM_KEYS]
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        row_max = new_max
        accumulator = tl.dot(
            weights.to(query.dtype),
            value.to(query.dtype),
            accumulator * shrink[:, None],
            input_precision="ieee",
        )
    return accumulator, row_max, row_sum
