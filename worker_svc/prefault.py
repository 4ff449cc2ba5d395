"""Gets memory for the KV cache from the system before it is written.

Fresh memory comes in huge pages, and the step that writes the first block of a slab would get those
of the whole slab: tens of milliseconds on machines whose own memory is virtual. So a thread asks
for them ahead, in the order of addresses: while no step runs, and for what is wanted soon now and
then beside steps.

    slabs    0 ... that of the highest block in use ... + NEAR_BYTES ... + AHEAD_BYTES ...
    pages                     are there                 | beside steps   | while idle  | not yet
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from worker_svc.kv_cache import KvCache
from worker_svc.model_runner import ModelRunner

log = logging.getLogger(__name__)

PIECE_BYTES = 2 << 20
"""A huge page."""
NEAR_BYTES = 64 << 20
"""How much of the cache beyond what is in use is got beside steps: more than a second's prompts
take."""
AHEAD_BYTES = 512 << 20
"""The same while no step runs."""
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
    """Part of the cache's memory."""

    address: int
    num_bytes: int


class Prefault:
    """Walks through the memory of a CPU's device pool, from its first slab to its last."""

    def __init__(self, cache: KvCache) -> None:
        slabs = cache.device_blocks
        self._blocks_per_slab = slabs.shape[3]
        self._slab_bytes = slabs.nbytes // len(slabs)
        self._begin = self._next = slabs.data_ptr()
        self._end = self._begin + slabs.nbytes

    @property
    def is_done(self) -> bool:
        return self._next == self._end

    def take(self, highest_block: int, *, is_idle: bool) -> Piece | None:
        """The next piece, if it is due; `highest_block` is the highest one that is or was in use.
        Slabs before its own are in use too."""
        in_use = self._begin + highest_block // self._blocks_per_slab * self._slab_bytes
        ahead = in_use + self._slab_bytes + (AHEAD_BYTES if is_idle else NEAR_BYTES)
        start = max(self._next, in_use)
        if start >= min(ahead, self._end):
            return None
        self._next = min(start + PIECE_BYTES, self._end)
        return Piece(start, self._next - start)


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
        piece = prefault.take(runner.state.highest_block, is_idle=idle_step is not None)
        if piece is None:
            time.sleep(REST_S)
        elif not populate(piece):
            log.debug("no memory ahead of its use: errno %d", ctypes.get_errno())
            return


def populate(piece: Piece) -> bool:
    """Gets the piece's memory and changes nothing in it. False where the system can't."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    start = piece.address - piece.address % mmap.PAGESIZE
    end = piece.address + piece.num_bytes
    return bool(madvise(start, end - start, POPULATE_WRITE) == 0)
