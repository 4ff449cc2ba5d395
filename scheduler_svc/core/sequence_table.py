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
        self.stop_ids: Ints = np.full((num_rows, INITIAL_STOP_IDS), NO_TOKEN, np.int64)
        # Tokens that are not in the sequence's list yet; token i is in column i % block_size.
        self._tail: Ints = np.zeros((num_rows, block_size), np.int64)
        self._sequences: list[Sequence | None] = [None] * num_rows
        self.refs: list[SequenceRef | None] = [None] * num_rows
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

    def add(self, seq: Sequence, row: int, num_computed: int, limit: int) -> None:
        """Enter `seq`, whose block table covers all its tokens."""
        assert self._sequences[row] is None, f"row {row} is taken"
        num_tokens = len(seq.token_ids)
        assert 0 <= num_computed < num_tokens < limit
        self.num_tokens[row] = self.num_total[row] = num_tokens
        self.num_computed[row] = num_computed
        self.capacity[row] = len(seq.block_table) * self.block_size
        self.limit[row] = limit
        self.last_step[row] = 0
        self._set_stop_ids(row, seq)
        self._sequences[row] = seq
        self.refs[row] = seq.ref
        self.num_active += 1
        self.top = max(self.top, row + 1)

    def remove(self, row: int) -> None:
        """Take the sequence out of its row; its token list is complete afterwards."""
        self.flush(row)
        self._sequences[row] = None
        self.refs[row] = None
        self.limit[row] = self.num_total[row] = self.num_computed[row] = 0
        self.generation[row] += 1
        self.num_active -= 1
        while self.top and self._sequences[self.top - 1] is None:
            self.top -= 1

    def flush(self, row: int) -> None:
        """Move the tail's tokens to the sequence's list; at most a block of them."""
        token_ids = self.sequence(row).token_ids
        first, count = len(token_ids), int(self.num_tokens[row]) - len(token_ids)
        assert 0 <= count <= self.block_size
        column = first % self.block_size
        token_ids.extend(self._tail[row, column : column + count].tolist())

    def append_tokens(self, rows: Ints, token_ids: Ints) -> None:
        """One more token for each row. Rows whose tail holds a full block must be flushed."""
        at = self.num_tokens[rows]
        self._tail[rows, at % self.block_size] = token_ids
        self.num_tokens[rows] = at + 1

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
        missing = len(stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self.stop_ids[row] = NO_TOKEN
        self.stop_ids[row, : len(stop_ids)] = stop_ids
