"""Work off the event loop: a few threads and a bounded queue before them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shared.errors import ResourceExhausted

Result = TypeVar("Result")


class BoundedThreads:
    """Runs calls; refuses those beyond the bound."""

    def __init__(
        self, num_threads: int, max_pending: int, refusal: Callable[[], ResourceExhausted]
    ) -> None:
        """`max_pending` calls may run or wait for a thread; further ones get a `refusal`."""
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="quire-text")
        self._max_pending = max_pending
        self._refusal = refusal
        self._num_pending = 0

    async def run(self, call: Callable[[], Result]) -> Result:
        """What `call` gives or raises. Raises ResourceExhausted when too many wait."""
        if self._num_pending >= self._max_pending:
            raise self._refusal()
        self._num_pending += 1
        future = asyncio.get_running_loop().run_in_executor(self._threads, call)
        # Counted until the thread is free again, also when the caller has left.
        future.add_done_callback(self._note_done)
        return await asyncio.shield(future)

    def close(self) -> None:
        """Lets go of the threads; a call that still runs is left to end by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _note_done(self, future: asyncio.Future[Result]) -> None:
        self._num_pending -= 1
        if not future.cancelled():
            future.exception()  # seen, also when the caller has left
