"""Changes and excludes logits by token id, before temperature and filters.

For one row, in this order, in float32 (`shared.sampling.TokenRules` says what each value is):

    repetition   x = x / p if x > 0 else x * p     each token of prompt and output, once
    presence,    x = x - (presence + count * frequency)
    frequency                                      each token of the output, count times there
    bias         x = x + bias
    exclusion    x = -inf   unless allowed; where banned; where it would complete a bad word; where
                            it ends the sequence and fewer than min_tokens are generated

Every operation is on single logits, so that a row can't depend on its neighbours, on any device.
A row's tokens are counted as they come; nothing here looks at all of a sequence but when it starts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kernels.logits import NO_BITS, Floats, Ids, LogitEntries, LogitKernels, LogitRules, RowMask
from shared.sampling import TokenRules

FIRST_TOKENS = 64
"""Room for distinct tokens at first."""


class TokenCounts:
    """The distinct tokens of a sequence, and how often the output has each."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._ids: Ids = np.zeros(FIRST_TOKENS, np.int64)
        self._counts: npt.NDArray[np.int32] = np.zeros(FIRST_TOKENS, np.int32)

    @property
    def ids(self) -> Ids:
        """[n] Tokens of prompt and output, in the order in which they first came."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        """[n] How often each is in the output."""
        return self._counts[: len(self._slots)]

    def add(self, token_ids: Sequence[int], *, is_output: bool) -> None:
        """Take the next tokens."""
        slots = self._slots
        for token in token_ids:
            slot = slots.setdefault(token, len(slots))
            if slot == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[slot] = token
            self._counts[slot] += is_output


class RowRules:
    """The rules of one sequence, and what they need to know of its tokens."""

    def __init__(self, rules: TokenRules, num_prompt_tokens: int) -> None:
        self.rules = rules
        self.counts = TokenCounts()
        self.bias_ids: Ids = np.array(rules.bias_token_ids, np.int64)
        self.biases: Floats = np.array(rules.biases, np.float32)
        self.allowed_ids: Ids = np.array(rules.allowed_token_ids, np.int64)
        self._num_prompt_tokens = num_prompt_tokens
        self._num_taken = 0
        self._tail: list[int] = []  # the last tokens, as many as a bad word's start may have
        single = [word[0] for word in rules.bad_words if len(word) == 1]
        self._banned: Ids = np.array(sorted({*rules.banned_token_ids, *single}), np.int64)
        self._end_ids: Ids = np.array(rules.end_token_ids, np.int64)
        # Starts of bad words by their last token, each with the token that must not follow.
        self._starts: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
        for word in rules.bad_words:
            if len(word) > 1:
                self._starts[word[-2]].append((list(word[:-1]), word[-1]))
        self._tail_length = max((len(word) - 1 for word in rules.bad_words), default=0)

    def catch_up(self, token_ids: npt.NDArray[np.int32]) -> None:
        """Take in what is new of the sequence's `token_ids`, which are all that it has."""
        new = token_ids[self._num_taken :].tolist()
        if self.rules.counts_tokens:
            num_prompt = max(0, self._num_prompt_tokens - self._num_taken)
            if self.rules.repetition_penalty != 1.0:
                self.counts.add(new[:num_prompt], is_output=False)
            self.counts.add(new[num_prompt:], is_output=True)
        if self._tail_length:
            self._tail = (self._tail + new)[-self._tail_length :]
        self._num_taken = len(token_ids)

    def excluded(self) -> Ids:
        """Tokens that may not come next, beside those that are not allowed; one may come twice."""
        parts = [self._banned]
        if self._num_taken - self._num_prompt_tokens < self.rules.min_tokens:
            parts.append(self._end_ids)
        if self._tail and self._tail[-1] in self._starts:
            ends = [
                end
                for start, end in self._starts[self._tail[-1]]
                if self._tail[-len(start) :] == start
            ]
            parts.append(np.array(ends, np.int64))
        return np.concatenate(parts)

    def offsets(self) -> Floats:
        """[n] What presence and frequency take from the logits of `counts.ids`."""
        counts = self.counts.counts
        rules = self.rules
        offsets = np.where(counts > 0, rules.presence_penalty + rules.frequency_penalty * counts, 0)
        return offsets.astype(np.float32)


def apply_rules(
    logits: torch.Tensor, places: Sequence[int], rules: Sequence[RowRules], kernels: LogitKernels
) -> None:
    """Apply `rules[i]`, which have caught up, to row `places[i]` of `logits` [n, vocab_size]
    float32, in place."""
    assert places
    counted = [one.counts.ids for one in rules]
    penalties = np.array([one.rules.repetition_penalty for one in rules], np.float32)
    merged = LogitRules(
        penalised=_entries(places, counted),
        penalties=np.repeat(penalties, [len(ids) for ids in counted]),
        offsets=np.concatenate([one.offsets() for one in rules]),
        biased=_entries(places, [one.bias_ids for one in rules]),
        biases=np.concatenate([one.biases for one in rules]),
        excluded=_entries(places, [one.excluded() for one in rules]),
    )
    kernels.apply_rules(logits, merged)
    masks = [
        RowMask(place, one.allowed_ids, NO_BITS)
        for place, one in zip(places, rules, strict=True)
        if len(one.allowed_ids)
    ]
    kernels.mask_tokens(logits, masks)


def _entries(places: Sequence[int], ids: Sequence[Ids]) -> LogitEntries:
    """The `ids[i]` of each of `places`."""
    rows = np.repeat(np.array(places, np.int64), [len(some) for some in ids])
    return LogitEntries(rows, np.concatenate(ids))
