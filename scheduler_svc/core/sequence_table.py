"""What every step touches, as arrays with a row for each running sequence of a replica.

    0 ......... num_computed ............ num_tokens ........ num_total ......... limit
    |-- keys and values planned --|                                 |
    |------------- tokens known here ---------|-- sampled in flight-|

A row's number is the sequence's handle on the worker. A row decodes when one token is left to
compute, and takes chunks when more are. `num_computed` and `num_total` are as of the plans sent;
`num_tokens` is as of the results that are back. A row without a sequence has limit 0 and takes
part in nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages import SequenceRef
from scheduler_svc.core.request import Sequence

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NO_TOKEN = -1
INITIAL_STOP_IDS = 4


class SequenceTable:
    """Rows of running sequences; free rows are given lowest first by the caller."""

    def __init__(self, num_rows: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_tokens: Ints = np.zeros(num_rows, np.int64)
        self.num_total: Ints = np.zeros(num_rows, np.int64)
        self.num_computed: Ints = np.zeros(num_rows, np.int64)
        self.capacity: Ints = np.zeros(num_rows, np.int64)  # token slots of the block table
        self.limit: Ints = np.zeros(num_rows, np.int64)  # most tokens it may come to
        self.last_step: Ints = np.zeros(num_rows, np.int64)  # last plan that names the row
        self.generation: Ints = np.zeros(num_rows, np.int64)  # grows when a sequence leaves
        self._stop_ids: Ints = np.full((INITIAL_STOP_IDS, num_rows), NO_TOKEN, np.int64)
        # A running sequence's list has whole blocks, or the whole prompt; the tokens after these
        # are in the tail, token i in column i % block_size.
        self._num_listed: Ints = np.zeros(num_rows, np.int64)
        self._tail: npt.NDArray[np.uint32] = np.zeros((num_rows, block_size), np.uint32)
        self._sequences: list[Sequence | None] = [None] * num_rows
        self._refs: npt.NDArray[np.object_] = np.empty(num_rows, np.object_)
        self.num_active = 0
        self.top = 0
        """Rows from here on have no sequence."""

    def __iter__(self) -> Iterator[Sequence]:
        """The sequences by row."""
        return (seq for seq in self._sequences[: self.top] if seq is not None)

    def sequence(self, row: int) -> Sequence:
        """The sequence of a row that has one."""
        seq = self._sequences[row]
        assert seq is not None, f"row {row} has no sequence"
        return seq

    def refs(self, rows: Ints) -> list[SequenceRef]:
        """The names of the sequences in `rows`, each of which has one."""
        refs: list[SequenceRef] = self._refs[rows].tolist()
        return refs

    def add(self, seq: Sequence, row: int, num_computed: int, limit: int) -> None:
        """Enter `seq`, whose block table covers all its tokens; the tokens after its last full
        block move from its list to the tail."""
        assert self._sequences[row] is None, f"row {row} is taken"
        num_tokens = len(seq.token_ids)
        assert 0 <= num_computed < num_tokens < limit
        self.num_tokens[row] = self.num_total[row] = num_tokens
        self.num_computed[row] = num_computed
        self.capacity[row] = len(seq.block_table) * self.block_size
        self.limit[row] = limit
        self.last_step[row] = 0
        num_listed = num_tokens - num_tokens % self.block_size
        self._num_listed[row] = num_listed
        self._tail[row, : num_tokens - num_listed] = seq.token_ids[num_listed:]
        del seq.token_ids[num_listed:]
        self._set_stop_ids(row, seq)
        self._sequences[row] = seq
        self._refs[row] = seq.ref
        self.num_active += 1
        self.top = max(self.top, row + 1)

    def remove(self, row: int) -> None:
        """Take the sequence out of its row; its token list is complete afterwards."""
        num_unlisted = int(self.num_tokens[row] - self._num_listed[row])
        self.sequence(row).token_ids += self._tail[row, :num_unlisted].tolist()
        self._sequences[row] = None
        self._refs[row] = None
        self.limit[row] = self.num_total[row] = self.num_computed[row] = 0
        self.generation[row] += 1
        self.num_active -= 1
        while self.top and self._sequences[self.top - 1] is None:
            self.top -= 1

    def append_tokens(self, rows: Ints, token_ids: Ints) -> list[tuple[Sequence, bytes]]:
        """One more token for each row. Where it opens a block, the full one before it moves to
        the sequence's list; gives these sequences with that block's tokens as bytes."""
        at = self.num_tokens[rows]
        filled = self._move_filled(rows[at - self._num_listed[rows] == self.block_size])
        self._tail[rows, at % self.block_size] = token_ids
        self.num_tokens[rows] = at + 1
        return filled

    def _move_filled(self, rows: Ints) -> list[tuple[Sequence, bytes]]:
        if not rows.size:
            return []
        self._num_listed[rows] += self.block_size
        tail = self._tail[rows]
        data, width = tail.tobytes(), tail.strides[0]
        filled = []
        for number, (row, tokens) in enumerate(zip(rows.tolist(), tail.tolist(), strict=True)):
            seq = self.sequence(row)
            seq.token_ids += tokens
            filled.append((seq, data[number * width : (number + 1) * width]))
        return filled

    def is_stop(self, rows: Ints, token_ids: Ints) -> Bools:
        """[len(rows)] Whether each row's token is one that ends its sequence."""
        hits: Bools = (self._stop_ids.take(rows, axis=1) == token_ids).any(axis=0)
        return hits

    def decoding(self) -> Bools:
        """[top] Rows with exactly one token to compute that may have one more."""
        total = self.num_total[: self.top]
        is_decoding: Bools = total - self.num_computed[: self.top] == 1
        is_decoding &= total < self.limit[: self.top]
        return is_decoding

    def prefilling(self) -> Ints:
        """Rows with several tokens to compute."""
        return np.flatnonzero(self.num_total[: self.top] - self.num_computed[: self.top] > 1)

    @property
    def prefill_backlog(self) -> int:
        """Tokens that are known and not planned yet."""
        return int((self.num_total[: self.top] - self.num_computed[: self.top]).sum())

    def _set_stop_ids(self, row: int, seq: Sequence) -> None:
        stop_ids = sorted(seq.request.new.eos_token_ids | seq.request.new.stop_token_ids)
        missing = len(stop_ids) - self._stop_ids.shape[0]
        if missing > 0:
            padding = ((0, missing), (0, 0))
            self._stop_ids = np.pad(self._stop_ids, padding, constant_values=NO_TOKEN)
        self._stop_ids[:, row] = NO_TOKEN
        self._stop_ids[: len(stop_ids), row] = stop_ids
