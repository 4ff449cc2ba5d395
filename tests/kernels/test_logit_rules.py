"""Triton's rules and masks change the bits that the reference changes, and no others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels import reference_logits
from kernels import triton as kernels
from kernels.logits import NO_BITS, LogitEntries, LogitRules, RowMask

NUM_ROWS, VOCAB_SIZE = 3, 1203
NO_IDS = np.zeros(0, np.int64)
NO_ENTRIES = LogitEntries(NO_IDS, NO_IDS)
NO_RULES = LogitRules(
    penalised=NO_ENTRIES,
    penalties=np.zeros(0, np.float32),
    offsets=np.zeros(0, np.float32),
    biased=NO_ENTRIES,
    biases=np.zeros(0, np.float32),
    excluded=NO_ENTRIES,
)


def some_logits(device: torch.device) -> torch.Tensor:
    """Rows of a wider tensor, with everything that float32 has."""
    generator = np.random.default_rng(3)
    values = generator.normal(size=(NUM_ROWS, VOCAB_SIZE + 5)).astype(np.float32) * 3
    values[:, ::7] = -np.inf
    values[:, ::11] = 0.0
    values[:, 1::13] = -0.0
    values[:, 2::17] = np.nan
    values[:, 3::19] = np.inf
    values[:, 4::23] = 1e-42  # below the normal floats
    return torch.from_numpy(values).to(device)[:, 2 : 2 + VOCAB_SIZE]


def some_entries(generator: np.random.Generator, count: int) -> LogitEntries:
    """Of rows 0 and 2; many tokens are in several lists."""
    places = generator.permutation(2 * VOCAB_SIZE)[:count]
    return LogitEntries(places // VOCAB_SIZE * 2, places % VOCAB_SIZE)


def floats(generator: np.random.Generator, low: float, high: float, count: int) -> np.ndarray:
    return generator.uniform(low, high, count).astype(np.float32)


def all_rules() -> LogitRules:
    generator = np.random.default_rng(4)
    return LogitRules(
        penalised=some_entries(generator, 1500),
        penalties=floats(generator, 0.3, 2.0, 1500),
        offsets=floats(generator, -2.0, 2.0, 1500),
        biased=some_entries(generator, 1000),
        biases=floats(generator, -100.0, 100.0, 1000),
        excluded=some_entries(generator, 257),
    )


def assert_same_bits(computed: torch.Tensor, expected: torch.Tensor) -> None:
    """All NaN are one: a device may have another."""
    one, other = computed.cpu().numpy(), expected.cpu().numpy()
    assert (np.isnan(one) == np.isnan(other)).all()
    numbers = ~np.isnan(one)
    assert (one[numbers].view(np.int32) == other[numbers].view(np.int32)).all()


def test_rules_of_all_kinds_go_in_order(device: torch.device) -> None:
    logits, expected = some_logits(device), some_logits(torch.device("cpu"))
    kernels.apply_rules(logits, all_rules())
    reference_logits.apply_rules(expected, all_rules())
    assert_same_bits(logits, expected)
    assert_same_bits(logits[1], some_logits(device)[1])


def test_an_entry_is_penalised_then_biased_then_excluded(device: torch.device) -> None:
    """By hand: (2 / 4 - 0.25) + 1, (-2 * 4 - 0.25) + 1, and what is excluded whatever comes."""
    logits = torch.tensor([[2.0, -2.0, 2.0, 5.0, torch.nan]], device=device)
    here = LogitEntries(np.zeros(4, np.int64), np.array([0, 1, 2, 4]))
    rules = LogitRules(
        penalised=here,
        penalties=np.full(4, 4.0, np.float32),
        offsets=np.full(4, 0.25, np.float32),
        biased=here,
        biases=np.full(4, 1.0, np.float32),
        excluded=LogitEntries(np.zeros(3, np.int64), np.array([2, 4, 2])),
    )
    kernels.apply_rules(logits, rules)
    assert logits.tolist() == [[1.25, -7.25, -torch.inf, 5.0, -torch.inf]]


def test_masks_of_bits_and_of_ids_leave_what_they_allow(device: torch.device) -> None:
    generator = np.random.default_rng(5)
    ids = np.flatnonzero(generator.random(VOCAB_SIZE) < 0.3)
    bits = np.packbits(generator.random(VOCAB_SIZE) < 0.6, bitorder="little")
    bits[-1] |= 0x80  # beyond the vocabulary
    for masks in (
        [RowMask(2, NO_IDS, bits), RowMask(0, ids, NO_BITS)],
        [RowMask(1, NO_IDS, NO_BITS)],
    ):
        logits, expected = some_logits(device), some_logits(torch.device("cpu"))
        kernels.mask_tokens(logits, masks)
        reference_logits.mask_tokens(expected, masks)
        assert_same_bits(logits, expected)


def test_nothing_to_change_is_no_launch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(kernels.logit_rules, "rule_kernel")
    monkeypatch.delattr(kernels.logit_rules, "mask_kernel")
    logits = some_logits(device)
    kernels.apply_rules(logits, NO_RULES)
    kernels.mask_tokens(logits, [])
    assert_same_bits(logits, some_logits(device))
