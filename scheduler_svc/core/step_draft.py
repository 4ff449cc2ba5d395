"""A step plan while it is being made, and the record that its result is held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from scheduler_svc.core.replica import PromptPlaces, StepRecord
from scheduler_svc.core.request import Sequence
from scheduler_svc.core.sequence_table import Ints, SequenceTable, row_index
from shared.plan import CacheOp, CacheOpKind, Fork, SequenceStart, StepPlan, TokenMask

NO_ROWS: Ints = np.empty(0, np.int64)


class StepDraft:
    """Collects what a step does beside the steady decodes, which stay an array of rows."""

    def __init__(self, step: int) -> None:
        self.record = StepRecord(step, NO_ROWS, NO_ROWS, [], [], [])
        self.start_rows: set[int] = set()
        self._starts: list[SequenceStart] = []
        self._append_rows: list[int] = []
        self._append_blocks: list[int] = []
        self._moves: dict[CacheOpKind, tuple[list[int], list[int]]] = {}
        self._forks: list[Fork] = []
        self._chosen_rows: list[int] = []
        self._chosen_token_ids: list[int] = []
        self._prompt_rows: list[int] = []  # those of _chunk_rows that give candidates
        self._beam_rows: list[int] = []  # one token each, candidates: decodes for the worker
        self._single_rows: list[int] = []  # one token each, sampled: decodes for the worker
        self._chunk_rows: list[int] = []
        self._chunk_sizes: list[int] = []
        self._chunk_samples: list[bool] = []
        self._sampled_rows: list[int] = []  # those of _chunk_rows that sample

    @property
    def has_work(self) -> bool:
        """Whether the step computes or moves anything beside steady decodes."""
        return bool(self.record.chunk_rows or self._beam_rows or self._moves)

    @property
    def num_beams(self) -> int:
        """Beams that compute a token."""
        return len(self._beam_rows)

    def append(self, rows: list[int], blocks: list[int]) -> None:
        """The sequence of rows[i] gets blocks[i] at the end of its table."""
        self._append_rows += rows
        self._append_blocks += blocks

    def start(self, start: SequenceStart) -> None:
        self._starts.append(start)
        self.start_rows.add(start.handle)

    def fork(self, fork: Fork) -> None:
        self._forks.append(fork)

    def choose(self, row: int, token_id: int) -> None:
        """The beam of `row` goes on with `token_id`, and gives candidates for the next one."""
        self._chosen_rows.append(row)
        self._chosen_token_ids.append(token_id)
        self._beam_rows.append(row)

    def compute_prompt(self, row: int, end: int, num_new: int, *, gives: bool) -> None:
        """The first beam computes `num_new` tokens of its prompt, up to `end`, and gives
        candidates at the prompt's end."""
        self.record.chunk_rows.append(row)
        self.record.chunk_ends.append(end)
        self._chunk_rows.append(row)
        self._chunk_sizes.append(num_new)
        self._chunk_samples.append(gives)
        if gives:
            self._prompt_rows.append(row)

    def compute(self, row: int, end: int, num_new: int, *, samples: bool) -> None:
        """The sequence of `row` computes `num_new` tokens up to its first `end`."""
        self.record.chunk_rows.append(row)
        self.record.chunk_ends.append(end)
        if samples and num_new == 1:
            self._single_rows.append(row)
            return
        self._chunk_rows.append(row)
        self._chunk_sizes.append(num_new)
        self._chunk_samples.append(samples)
        if samples:
            self._sampled_rows.append(row)

    def score_prompt(self, row: int, places: PromptPlaces) -> None:
        """The chunk of `row` tells log-probabilities of its prompt at `places`."""
        self.record.prompt_places[row] = places

    def swap_out(self, device_blocks: list[int], host_blocks: list[int]) -> None:
        self._move(CacheOpKind.SWAP_OUT, device_blocks, host_blocks)

    def swap_in(self, host_blocks: list[int], device_blocks: list[int]) -> None:
        self._move(CacheOpKind.SWAP_IN, host_blocks, device_blocks)

    def copy(self, source: int, target: int) -> None:
        self._move(CacheOpKind.COPY, [source], [target])

    def _move(self, kind: CacheOpKind, sources: list[int], targets: list[int]) -> None:
        all_sources, all_targets = self._moves.setdefault(kind, ([], []))
        all_sources += sources
        all_targets += targets

    def finish(
        self,
        decode_rows: Ints,
        constrained: Mapping[int, Sequence],
        *,
        base_step: int,
        reset: bool,
        finished_handles: list[int],
        next_op_id: Callable[[], int],
    ) -> StepPlan:
        """The plan. Copies out come before copies in, and copies on the device come last.
        `constrained` are sequences by row; those that sample get their masks."""
        decode_handles = decode_rows.tolist() + self._single_rows
        self.record.sample_handles = decode_handles + self._sampled_rows
        masks = self._masks(constrained) if constrained else {}
        return StepPlan(
            step=self.record.step,
            base_step=base_step,
            reset=reset,
            finished_handles=finished_handles,
            starts=self._starts,
            forks=self._forks,
            chosen_handles=self._chosen_rows,
            chosen_token_ids=self._chosen_token_ids,
            append_handles=self._append_rows,
            append_blocks=self._append_blocks,
            cache_ops=self._cache_ops(next_op_id) if self._moves else (),
            decode_handles=decode_handles + self._beam_rows,
            chunk_handles=self._chunk_rows,
            chunk_num_tokens=self._chunk_sizes,
            chunk_samples=self._chunk_samples,
            masked_handles=list(masks),
            masks=list(masks.values()),
        )

    def _cache_ops(self, next_op_id: Callable[[], int]) -> list[CacheOp]:
        order = (CacheOpKind.SWAP_OUT, CacheOpKind.SWAP_IN, CacheOpKind.COPY)
        return [
            CacheOp(next_op_id(), kind, *self._moves[kind]) for kind in order if kind in self._moves
        ]

    def _masks(self, constrained: Mapping[int, Sequence]) -> dict[int, TokenMask]:
        """By row, where not every token is allowed."""
        masks = {}
        for row in self.record.sample_handles:
            seq = constrained.get(row)
            if seq is not None and seq.constraint is not None and seq.constraint.mask is not None:
                masks[row] = seq.constraint.mask
        return masks

    def fill_record(self, decode_rows: Ints, table: SequenceTable) -> None:
        """Note what the plan computes and samples, and count it in the rows of `table`."""
        record = self.record
        record.sample_rows = decode_rows
        record.sample_index = index = row_index(decode_rows)
        table.num_computed[index] += 1
        table.num_total[index] += 1
        for row, end in zip(record.chunk_rows, record.chunk_ends, strict=True):
            table.num_computed[row] = end
        if self._beam_rows or self._prompt_rows:
            self._fill_candidates(table)
        if sampled := self._single_rows + self._sampled_rows:
            table.num_total[sampled] += 1
            record.sample_rows = np.concatenate((decode_rows, np.array(sampled, np.int64)))
            record.sample_index = record.sample_rows
        if asked := table.num_logprobs:
            record.num_logprobs = {row: asked[row] for row in record.sample_handles if row in asked}

    def _fill_candidates(self, table: SequenceTable) -> None:
        record = self.record
        for row in self._beam_rows:
            table.num_computed[row] += 1
            table.num_total[row] += 1
        record.candidate_rows = self._beam_rows + self._prompt_rows
