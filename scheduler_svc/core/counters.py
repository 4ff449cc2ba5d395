"""What the scheduler counts over its life, for metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals; they only grow."""

    preemptions: int = 0
    swaps_out: int = 0
    """Preemptions by swap, which `preemptions` counts too."""
    recoveries: int = 0
    """Requests that wait again because their replica was lost."""
    prefix_lookup_tokens: int = 0
    """Tokens of sequences that started, or started again."""
    prefix_hit_tokens: int = 0
    """How many of these needed no computing."""
