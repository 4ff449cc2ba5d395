"""Takes what comes to a socket whose descriptor tells of news once, on an event loop.

    descriptor -- news --> take_one() until it finds nothing --> done()
    look() ---------------^

Any use of such a socket may be what hears the news, so `look` must follow uses by others. No task
and no future stands between what comes and who takes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

MAX_AT_ONCE = 100
"""Messages that are taken before the loop does something else."""


class DescriptorReader:
    """Build and use it on one event loop."""

    def __init__(
        self, descriptor: int, take_one: Callable[[], bool], done: Callable[[], None] | None = None
    ) -> None:
        """`take_one` takes the next message, and says whether there was one; `done` is called
        after some that came together."""
        self._descriptor = descriptor
        self._take_one = take_one
        self._done = done
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(descriptor, self.look)
        self._loop.call_soon(self.look)  # at what came before

    def look(self) -> None:
        """Takes what is there."""
        num_taken = 0
        while not self._is_closed and self._take_one():
            num_taken += 1
            if num_taken == MAX_AT_ONCE:
                self.look_soon()
                break
        if num_taken and self._done is not None:
            self._done()

    def look_soon(self) -> None:
        """Looks before the loop waits again."""
        self._loop.call_soon(self.look)

    def close(self) -> None:
        """Takes nothing more."""
        self._is_closed = True
        self._loop.remove_reader(self._descriptor)
