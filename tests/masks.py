"""What a mask allows."""

from __future__ import annotations

import numpy as np

from shared.plan import TokenMask


def ids_of(mask: TokenMask | None) -> list[int]:
    """The ids, ascending; there must be a mask."""
    assert mask is not None and bool(mask.token_ids) != bool(mask.bits)
    if mask.token_ids:
        return list(mask.token_ids)
    bits = np.unpackbits(np.frombuffer(mask.bits, np.uint8), bitorder="little")
    ids: list[int] = bits.nonzero()[0].tolist()
    return ids
