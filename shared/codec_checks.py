"""What the codecs demand of a message."""

from __future__ import annotations

from collections.abc import Sized

from shared.errors import ProtocolError


def require(holds: bool, description: str) -> None:
    """Raises ProtocolError with `description` unless it holds."""
    if not holds:
        raise ProtocolError(description)


def require_same_length(what: str, left: Sized, right: Sized) -> None:
    """Raises ProtocolError when two lists of `what` can't belong together."""
    if len(left) != len(right):
        raise ProtocolError(f"the lists of {what} differ in length: {len(left)}, {len(right)}")
