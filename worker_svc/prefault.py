"""Gets memory for the KV cache from the system before it is written.

Fresh memory comes in huge pages, and the pages of one range of blocks, one for each layer and head,
would all come in the step that writes the first of these blocks: half a second on machines whose
own memory is virtual. So a thread asks for them ahead: while no step runs, and for what is wanted
soon now and then beside steps.

    blocks   0 ... highest in use ... + a range of pieces ... + AHEAD_BYTES ...
    pages        are there        | also beside steps     | while idle    | not yet
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kernels.interface import HEAD_MAJOR
from worker_svc.kv_cache import KvCache
from worker_svc.model_runner import ModelRunner

log = logging.getLogger(__name__)

PIECE_BYTES = 2 << 20
"""A huge page."""
AHEAD_BYTES = 512 << 20
"""How much of the cache is got before blocks of it are in use."""
IDLE_S = 0.02
"""No step for so long is an idle moment."""
BESIDE_STEPS_S = 0.05
"""Between two pieces that are got while steps run."""
REST_S = 0.5
"""Between two looks when nothing is due."""
POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of linux/mman.h, since Linux 5.14."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of the memory of the blocks from `first_block` on, in one layer and head."""

    first_block: int
    address: int
    num_bytes: int


def pieces(cache: KvCache) -> Iterator[Piece]:
    """The memory of a CPU's device pool, range of blocks by range of blocks."""
    in_order = cache.device_blocks.permute(HEAD_MAJOR)
    num_runs = in_order.shape[0] * in_order.shape[1]
    run_bytes = in_order.nbytes // num_runs
    block_bytes = run_bytes // in_order.shape[2]
    for start in range(0, run_bytes, PIECE_BYTES):
        for run in range(num_runs):
            yield Piece(
                start // block_bytes,
                in_order.data_ptr() + run * run_bytes + start,
                min(PIECE_BYTES, run_bytes - start),
            )


class Prefault:
    """Walks through a cache's pieces; `may_get` says when the next one is due."""

    def __init__(self, cache: KvCache) -> None:
        blocks = cache.device_blocks
        block_bytes = blocks.nbytes // len(blocks)
        num_runs = blocks.shape[1] * blocks.shape[3]
        self._ahead_blocks = AHEAD_BYTES // block_bytes
        self._near_blocks = PIECE_BYTES * num_runs // block_bytes
        self._pieces = pieces(cache)
        self._next = next(self._pieces, None)

    @property
    def is_done(self) -> bool:
        return self._next is None

    def may_get(self, highest_block: int, *, is_idle: bool) -> bool:
        """Whether to get a piece now; `highest_block` is the highest one that is or was in use."""
        if self._next is None:
            return False
        distance = self._next.first_block - highest_block
        return distance <= (self._ahead_blocks if is_idle else self._near_blocks)

    def take(self) -> Piece:
        """The next piece, which `may_get` allowed."""
        assert self._next is not None
        taken, self._next = self._next, next(self._pieces, None)
        return taken


def start(runner: ModelRunner, idle_after: Callable[[], int | None]) -> None:
    """Starts the thread for the cache of a CPU's `runner`, where the system can do this; it ends by
    itself or with the process.

    `idle_after` gives the last step, None while one runs.
    """
    if sys.platform == "linux":
        threading.Thread(
            target=_run, args=(runner, idle_after), name="quire-prefault", daemon=True
        ).start()


def _run(runner: ModelRunner, idle_after: Callable[[], int | None]) -> None:
    prefault = Prefault(runner.cache)
    idle_step = None  # the step that an idle moment came after
    while not prefault.is_done:
        step = idle_after()
        if step is None or step != idle_step:
            time.sleep(BESIDE_STEPS_S if step is None else IDLE_S)
            idle_step = step if step == idle_after() else None
        if not prefault.may_get(runner.state.highest_block, is_idle=idle_step is not None):
            time.sleep(REST_S)
        elif not populate(prefault.take()):
            log.debug("no memory ahead of its use: errno %d", ctypes.get_errno())
            return


def populate(piece: Piece) -> bool:
    """Gets the piece's memory and changes nothing in it. False where the system can't."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    start = piece.address - piece.address % mmap.PAGESIZE
    end = piece.address + piece.num_bytes
    return bool(madvise(start, end - start, POPULATE_WRITE) == 0)
