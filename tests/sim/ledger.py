"""Which blocks the plans on their way name, so that none is given away before they are back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from shared.plan import CacheOpKind, StepPlan


@dataclass(slots=True)
class _Named:
    """Blocks that one plan reads or writes."""

    device: set[int]
    host: set[int]


@dataclass(slots=True)
class BlockLedger:
    """One replica's plans as they are sent and answered."""

    block_size: int
    _tables: dict[int, list[int]] = field(default_factory=dict)
    _in_flight: deque[_Named] = field(default_factory=deque)

    def sent(self, plan: StepPlan) -> None:
        """AssertionError when the plan gives a sequence a block that a plan in flight names."""
        if plan.reset:
            self._tables.clear()
        for handle in plan.finished_handles:
            del self._tables[handle]
        given = set(plan.append_blocks)
        host_given: set[int] = set()
        for start in plan.starts:
            self._tables[start.handle] = list(start.block_table)
            given.update(start.block_table[start.num_computed_tokens // self.block_size :])
        copied = {
            block
            for op in plan.cache_ops
            if op.kind is CacheOpKind.COPY
            for block in op.target_blocks
        }
        for fork in plan.forks:
            source = self._tables[fork.source]
            full = source[:-1] if fork.block in copied else source
            self._tables[fork.handle] = [*full, fork.block]
            given.add(fork.block)
        for handle, block in zip(plan.append_handles, plan.append_blocks, strict=True):
            self._tables[handle].append(block)
        named = _Named(set(), set())
        for handle in (*plan.decode_handles, *plan.chunk_handles):
            named.device.update(self._tables[handle])
        for op in plan.cache_ops:
            if op.kind is CacheOpKind.SWAP_OUT:
                host_given.update(op.target_blocks)
                named.device.update(op.source_blocks)
            elif op.kind is CacheOpKind.SWAP_IN:
                given.update(op.target_blocks)
                named.host.update(op.source_blocks)
            else:
                named.device.update(op.source_blocks)
        for earlier in self._in_flight:
            assert not given & earlier.device, "a block is given that a plan in flight names"
            assert not host_given & earlier.host, "a host block is given that a plan reads"
        self._in_flight.append(named)

    def answered(self) -> None:
        """The oldest plan is back."""
        self._in_flight.popleft()

    def void(self) -> None:
        """No plan is in flight any more."""
        self._in_flight.clear()
