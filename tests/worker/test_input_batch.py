"""A step's tensors, against the state that they are made of."""

from __future__ import annotations

import torch

from shared.plan import SequenceStart, StepPlan
from shared.sampling import SamplingParams
from worker_svc.input_batch import InputBatch, build_batch
from worker_svc.request_state import RequestState

BLOCK_SIZE = 8
CPU = torch.device("cpu")
LENGTHS = {2: 1, 5: 8, 0: 9, 3: 30}
CHUNKED = 7
DRAWN = SamplingParams(temperature=1.0)
GREEDY = SamplingParams(temperature=0.0)


def make_state() -> RequestState:
    """Sequences of LENGTHS whose last token is to be computed, every other greedy, and one whose 20
    tokens are."""
    state = RequestState(
        num_rows=8, context_length=64, block_size=BLOCK_SIZE, num_blocks=40, vocab_size=200
    )
    starts = [
        SequenceStart(
            handle,
            token_ids=[10 * handle + n for n in range(length)],
            num_prompt_tokens=length,
            num_computed_tokens=0 if handle == CHUNKED else length - 1,
            block_table=[5 * handle + n for n in range(-(-length // BLOCK_SIZE))],
            sampling=GREEDY if handle % 2 else DRAWN,
        )
        for handle, length in [*LENGTHS.items(), (CHUNKED, 20)]
    ]
    state.apply(StepPlan(step=1, base_step=0, starts=starts))
    return state


def build(plan: StepPlan) -> InputBatch:
    batch = build_batch(make_state(), plan, CPU)
    assert batch is not None
    return batch


def test_decodes_alone_have_the_inputs_that_they_have_beside_a_chunk() -> None:
    decodes = list(LENGTHS)
    alone = build(StepPlan(step=2, base_step=1, decode_handles=decodes))
    beside = build(
        StepPlan(
            step=2,
            base_step=1,
            decode_handles=decodes,
            chunk_handles=[CHUNKED],
            chunk_num_tokens=[20],
            chunk_samples=[False],
        )
    )
    num_seqs = len(decodes)
    one, other = alone.attention, beside.attention
    num_columns = one.block_tables.shape[1]
    for mine, theirs in (
        (alone.token_ids, beside.token_ids[:num_seqs]),
        (one.query_start, other.query_start[: num_seqs + 1]),
        (one.seq_lens, other.seq_lens[:num_seqs]),
        (one.block_tables, other.block_tables[:num_seqs, :num_columns]),
        (one.slots, other.slots[:num_seqs]),
        (one.positions, other.positions[:num_seqs]),
        (alone.logit_rows, beside.logit_rows),
        (alone.greedy_logit_rows, beside.greedy_logit_rows),
    ):
        assert mine.dtype == theirs.dtype
        assert mine.is_contiguous() and torch.equal(mine, theirs)
    assert alone.sampling_rows.tolist() == beside.sampling_rows.tolist() == [2, 0]
    assert alone.greedy_rows.tolist() == beside.greedy_rows.tolist() == [5, 3]
    assert (one.max_query_len, one.max_seq_len) == (1, 30)


def test_each_token_of_a_chunk_has_its_own_position_and_slot() -> None:
    plan = StepPlan(
        step=2,
        base_step=1,
        decode_handles=[5],
        chunk_handles=[CHUNKED],
        chunk_num_tokens=[20],
        chunk_samples=[False],
    )
    batch = build(plan)
    assert batch.token_ids.tolist() == [57, *range(70, 90)]
    assert batch.attention.positions.tolist() == [7, *range(20)]
    # Blocks 25 and, of the chunk, 35 to 37
    assert batch.attention.slots.tolist() == [25 * 8 + 7, *range(35 * 8, 37 * 8 + 4)]
    assert batch.attention.query_start.tolist() == [0, 1, 21]
    assert batch.attention.seq_lens.tolist() == batch.ends.tolist() == [8, 20]
