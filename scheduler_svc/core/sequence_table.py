"""What every step touches, as arrays with a row for each running sequence of a replica.

    0 ......... num_computed ............ num_tokens ........ num_total ......... limit
    |-- keys and values planned --|                                 |
    |------------- tokens known here ---------|-- sampled in flight-|

A row's number is the sequence's handle on the worker. A row decodes when one token is left to
compute, and takes chunks when more are. `num_computed` and `num_total` are as of the plans sent;
`num_tokens` is as of the results that are back. A row without a sequence has limit 0 and takes
part in nothing. The row of a beam has its prompt's length as limit, so that it never decodes by
itself; it knows the prompt's tokens, and computes further ones as its group goes on. The row of a
constrained sequence has one token more than are known as limit: it decodes when its last token is
back, and each of its tokens is looked at as a last one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages import SequenceRef
from scheduler_svc.core.request import Sequence

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

RowIndex = Ints | slice
"""Names rows of the arrays; a slice gives views, where an array would gather."""

NO_TOKEN = -1
TAIL_RESULTS = 128
"""Results whose tokens are kept in an array before they move to the sequences' lists."""
INITIAL_STOP_IDS = 1


def row_index(rows: Ints) -> RowIndex:
    """Names ascending `rows`."""
    if not rows.size:
        return rows
    first, last = rows.item(0), rows.item(-1)
    return slice(first, last + 1) if last - first + 1 == rows.size else rows


class SequenceTable:
    """Rows of running sequences; free rows are given lowest first by the caller."""

    def __init__(self, num_rows: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_tokens: Ints = np.zeros(num_rows, np.int64)
        self.num_started: Ints = np.zeros(num_rows, np.int64)  # tokens that it came with
        self.num_total: Ints = np.zeros(num_rows, np.int64)
        self.num_computed: Ints = np.zeros(num_rows, np.int64)
        self.capacity: Ints = np.zeros(num_rows, np.int64)  # token slots of the block table
        self.limit: Ints = np.zeros(num_rows, np.int64)  # most tokens it may come to
        self._stop_ids: Ints = np.full((INITIAL_STOP_IDS, num_rows), NO_TOKEN, np.int64)
        # What came last, not in the sequences' lists yet: a column for each result, NO_TOKEN
        # where it had no token for the row.
        self._tail: Ints = np.full((num_rows, TAIL_RESULTS), NO_TOKEN, np.int64)
        self._tail_size = 0
        self._sequences: list[Sequence | None] = [None] * num_rows
        self._refs: npt.NDArray[np.object_] = np.empty(num_rows, np.object_)
        self._named_rows: bytes | None = None  # what refs gave last, while no row has changed
        self._names: list[SequenceRef] = []
        self.num_logprobs: dict[int, int] = {}
        """Rows whose tokens' log-probabilities are told, each with how many likeliest ones."""
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

    def sequences(self, rows: list[int]) -> list[Sequence]:
        """The sequences of `rows`, each of which has one."""
        known = self._sequences
        sequences = [seq for row in rows if (seq := known[row]) is not None]
        assert len(sequences) == len(rows), "a row has no sequence"
        return sequences

    def refs(self, rows: Ints) -> list[SequenceRef]:
        """The names of the sequences in `rows`, each of which has one. A step that gives tokens to
        the same sequences as the one before gets the same list, so that no name is touched."""
        named_rows = rows.tobytes()
        if self._named_rows != named_rows:
            self._named_rows, self._names = named_rows, self._refs[rows].tolist()
        return self._names

    def add(self, seq: Sequence, row: int, num_computed: int, limit: int) -> None:
        """Enter `seq`, whose block table covers all its tokens."""
        assert self._sequences[row] is None, f"row {row} is taken"
        num_tokens = len(seq.token_ids)
        assert 0 <= num_computed < num_tokens <= limit
        self.num_started[row] = self.num_tokens[row] = self.num_total[row] = num_tokens
        self.num_computed[row] = num_computed
        self.capacity[row] = len(seq.block_table) * self.block_size
        self.limit[row] = limit
        self._set_stop_ids(row, seq)
        self._sequences[row] = seq
        self._refs[row] = seq.ref
        self._named_rows = None
        if seq.request.new.sampling.num_logprobs is not None:
            self.num_logprobs[row] = seq.request.new.sampling.num_logprobs
        self.num_active += 1
        self.top = max(self.top, row + 1)

    def add_fork(self, seq: Sequence, row: int, source: int) -> None:
        """Enter `seq`, which knows the prompt as the beam in row `source` does, as its copy."""
        self.add(seq, row, 0, int(self.limit[source]))
        self.num_total[row] = self.num_total[source]
        self.num_computed[row] = self.num_computed[source]

    def remove(self, row: int) -> None:
        """Take the sequence out of its row; its token list is complete afterwards."""
        self.sequence(row).token_ids.frombytes(self.tail(row).astype(np.uint32).tobytes())
        self._tail[row] = NO_TOKEN
        self._sequences[row] = self._refs[row] = None
        self._named_rows = None
        self.limit[row] = self.num_total[row] = self.num_computed[row] = 0
        self.num_logprobs.pop(row, None)
        self.num_active -= 1
        while self.top and self._sequences[self.top - 1] is None:
            self.top -= 1

    def append_tokens(self, index: RowIndex, token_ids: Ints) -> Bools:
        """One more token for each of the rows; gives whether it is the last that each may have."""
        if self._tail_size == TAIL_RESULTS:
            self._empty_tail()
        self._tail[index, self._tail_size] = token_ids
        self._tail_size += 1
        num_tokens = self.num_tokens[index] + 1
        self.num_tokens[index] = num_tokens
        is_last: Bools = num_tokens >= self.limit[index]
        return is_last

    def tail(self, row: int) -> Ints:
        """The last tokens of a row, which are not in its sequence's list yet."""
        tail = self._tail[row]
        tokens: Ints = tail[tail != NO_TOKEN]
        return tokens

    def _empty_tail(self) -> None:
        tails = self._tail[: self.top]
        sequences = self._sequences[: self.top]
        for seq, tail, is_token in zip(
            sequences, tails.astype(np.uint32), tails != NO_TOKEN, strict=True
        ):
            if seq is not None:
                seq.token_ids.frombytes(tail[is_token].tobytes())
        self._tail.fill(NO_TOKEN)
        self._tail_size = 0

    def is_stop(self, index: RowIndex, token_ids: Ints) -> Bools:
        """Whether each row's token is one that ends its sequence."""
        hits: Bools = self._stop_ids[0, index] == token_ids
        for stop_ids in self._stop_ids[1:]:
            hits |= stop_ids[index] == token_ids
        return hits

    def decoding(self) -> Bools:
        """[top] Rows with exactly one token to compute that may have one more."""
        total = self.num_total[: self.top]
        is_decoding: Bools = total - self.num_computed[: self.top] == 1
        is_decoding &= total < self.limit[: self.top]
        return is_decoding

    def prefilling(self) -> list[int]:
        """Rows with several tokens to compute."""
        is_prefilling = self.num_total[: self.top] - self.num_computed[: self.top] > 1
        rows: list[int] = is_prefilling.nonzero()[0].tolist()
        return rows

    @property
    def prefill_backlog(self) -> int:
        """Tokens that are known and not planned yet."""
        return int((self.num_total[: self.top] - self.num_computed[: self.top]).sum())

    def _set_stop_ids(self, row: int, seq: Sequence) -> None:
        stop_ids = sorted(seq.request.new.end_ids)
        missing = len(stop_ids) - self._stop_ids.shape[0]
        if missing > 0:
            padding = ((0, missing), (0, 0))
            self._stop_ids = np.pad(self._stop_ids, padding, constant_values=NO_TOKEN)
        self._stop_ids[:, row] = NO_TOKEN
        self._stop_ids[: len(stop_ids), row] = stop_ids
