"""What a step does to the logits of its rows before and at the draw: the values and signatures.

Logits are float32 [n, vocab_size], one row a sequence. A row is computed by itself, in an order
that depends on nothing but the row, so that a token can't change with its neighbours. Lists and
parameters are made on the host, and stay there: an implementation moves what it needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

NO_BITS: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)


@dataclass(frozen=True, slots=True)
class LogitEntries:
    """Single logits: entry i is token `ids[i]` of row `rows[i]`."""

    rows: Ids  # [n]
    ids: Ids  # [n]


@dataclass(frozen=True, slots=True)
class LogitRules:
    """Changes of single logits x, in this order, each operation rounded to float32 by itself:

    penalised   x = (x / penalty if x > 0 else x * penalty) - offset
    biased      x = x + bias
    excluded    x = -inf

    A list has an entry at most once, but for `excluded`.
    """

    penalised: LogitEntries
    penalties: Floats  # [as many]
    offsets: Floats
    biased: LogitEntries
    biases: Floats
    excluded: LogitEntries


@dataclass(frozen=True, slots=True)
class RowMask:
    """The tokens that a row may draw: of `bits` where there are any, else `ids`."""

    row: int
    ids: Ids  # [n], each in the vocabulary
    bits: npt.NDArray[np.uint8]  # [ceil(vocab_size / 8)] little-endian, or [0]

    def is_allowed(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """[vocab_size] Whether each token may be drawn."""
        if len(self.bits):
            return np.unpackbits(self.bits, count=vocab_size, bitorder="little").view(np.bool_)
        is_allowed = np.zeros(vocab_size, np.bool_)
        is_allowed[self.ids] = True
        return is_allowed

    def packed(self, vocab_size: int) -> npt.NDArray[np.uint8]:
        """[ceil(vocab_size / 8)] The same as bits, little-endian."""
        if len(self.bits):
            return self.bits
        return np.packbits(self.is_allowed(vocab_size), bitorder="little")


@dataclass(frozen=True, slots=True)
class Draws:
    """How each row [n] draws; `kernels.draw_row` has the rule."""

    temperature: Floats  # 0 takes the likeliest token, and nothing below counts
    top_k: Ids  # 0 is all
    top_p: Floats
    min_p: Floats
    typical_p: Floats
    numbers: npt.NDArray[np.float64]  # uniform in [0, 1)

    @classmethod
    def greedy(cls, num_rows: int) -> Draws:
        """The likeliest token of each row."""
        floats = np.zeros(num_rows, np.float32)
        return cls(
            temperature=floats,
            top_k=np.zeros(num_rows, np.int64),
            top_p=floats,
            min_p=floats,
            typical_p=floats,
            numbers=np.zeros(num_rows),
        )

    def filtered(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """[n] Whether a filter may take tokens from a row."""
        is_ranked = (self.top_k > 0) & (self.top_k < vocab_size)
        return is_ranked | (self.top_p < 1.0) | (self.min_p > 0.0) | (self.typical_p < 1.0)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What the rows [n] drew."""

    token_ids: Ids
    """Meaningless where `is_sound` is false."""
    is_sound: npt.NDArray[np.bool_]
    """False where the logits hold a NaN, or their largest is infinite; so also where nothing is
    left to draw."""
    is_empty: npt.NDArray[np.bool_]
    """True where nothing is left to draw."""


def drawn_best(token_ids: Ids, highest: Floats) -> Drawn:
    """The likeliest tokens of rows [n], whose logits are `highest`; NaN stands above all."""
    values = highest.tolist()  # they are few: arrays' operations would take longer
    is_sound = np.array([math.isfinite(value) for value in values], np.bool_)
    return Drawn(token_ids, is_sound, np.array([value == -math.inf for value in values], np.bool_))


class LogitKernels(Protocol):
    """One implementation, for one device."""

    def apply_rules(self, logits: torch.Tensor, rules: LogitRules) -> None:
        """Apply `rules` to `logits`, in place."""

    def mask_tokens(self, logits: torch.Tensor, masks: Sequence[RowMask]) -> None:
        """Set the logits of tokens that `masks` don't allow to -inf, in place. Each row has one
        mask at most."""

    def draw_tokens(self, logits: torch.Tensor, draws: Draws) -> Drawn:
        """Draw one token a row; equal logits rank by the lower id."""
        ...
