"""What a mask allows, read apart from the product's own code."""

from __future__ import annotations

from shared.plan import TokenMask


def ids_of(mask: TokenMask | None) -> list[int]:
    """The ids, ascending; there must be a mask."""
    assert mask is not None and bool(mask.token_ids) != bool(mask.bits)
    if mask.token_ids:
        return list(mask.token_ids)
    as_number = int.from_bytes(mask.bits, "little")
    return [token for token in range(8 * len(mask.bits)) if as_number >> token & 1]
