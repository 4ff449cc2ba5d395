"""When streams write: at once while there is room, in turns when many flow.

A message costs the process about the same whether it carries one token or ten, so what must be
bounded is messages, not tokens:

    tokens     |  | |  | |  | |  | |  | |  |         |
    messages   |     |      |      |      |          |
               ^     '-pause-'                       ^
               a stream that was idle writes at once, and so does one that is idle again

All streams have the same pause between two messages, which is what keeps the process within its
budget:

    pause = streams that flow x processor seconds of a message / CPU_BUDGET

Few streams have a pause shorter than any step takes, and merge nothing; a stream whose tokens come
slower than its pause is never held, whatever the others do. The cost of a message is measured: all
the processor time of the process, by the messages that it wrote meanwhile.
"""

from __future__ import annotations

import heapq
import time
from asyncio import TimerHandle, get_running_loop
from collections.abc import Callable
from itertools import count

CPU_BUDGET = 0.9
"""Processor seconds a second that the process may use before streams must pause longer."""
DEFAULT_COST_S = 100e-6
"""Of a message, before it was measured."""
MIN_COST_S, MAX_COST_S = 40e-6, 200e-6
"""What is measured is held within these, so that work of another kind cannot stop the streams."""
MIN_MEASURED_MESSAGES = 1000
"""In one window; among fewer messages their cost does not show."""
WINDOW_S = 1.0
"""A stream flows if it wrote in the window before or in this one."""
GROUP, MIN_GROUP_S = 0.1, 0.001
"""Streams that are due within this part of a pause, or so many seconds, are woken together: in
bursts a message costs less, but large bursts keep others waiting."""


class WritePacer:
    """Counts the streams that flow, and wakes those that wait for their turn. One event loop's."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        """`cpu_clock` gives the seconds of processor time that the process has used."""
        self._clock = clock
        self._cpu_clock = cpu_clock
        self.window = 0
        """Number of the present window; a stream remembers in which it was counted."""
        self._window_end_s = clock() + WINDOW_S
        self._window_cpu_s = cpu_clock()
        self._num_messages = 0
        self._num_flowing = 0
        """Messages that all streams which wrote in this window write at a time."""
        self._num_flowing_before = 0
        self._cost_s = DEFAULT_COST_S
        self.pause_s = 0.0
        """Seconds between two messages of one stream."""
        self._held: list[tuple[float, int, Callable[[], None]]] = []
        """A heap of (when due, tie-breaker, what to call)."""
        self._numbers = count()
        self._timer: TimerHandle | None = None
        self._timer_s = 0.0

    def note_write(self, counted_in: int, weight: int) -> float:
        """A stream writes a message; gives when it may write the next one. It was last counted in
        the window `counted_in`, and counts in `window` from now on; it writes `weight` messages at
        a time."""
        now = self._clock()
        if now >= self._window_end_s:
            self._begin_window(now)
        self._num_messages += 1
        if counted_in != self.window:
            self._num_flowing += weight
            self._set_pause()
        return now + self.pause_s

    def hold(self, due_s: float, wake: Callable[[], None]) -> None:
        """Calls `wake` at `due_s`, or a little earlier together with others."""
        heapq.heappush(self._held, (due_s, next(self._numbers), wake))
        if self._timer is None or due_s < self._timer_s:
            self._set_timer(due_s)

    def _begin_window(self, now: float) -> None:
        was_silent = now >= self._window_end_s + WINDOW_S
        cpu_s = self._cpu_clock()
        if not was_silent and self._num_messages >= MIN_MEASURED_MESSAGES:
            cost_s = (cpu_s - self._window_cpu_s) / self._num_messages
            self._cost_s = min(max(cost_s, MIN_COST_S), MAX_COST_S)
        self._num_flowing_before = 0 if was_silent else self._num_flowing
        self._num_flowing = self._num_messages = 0
        self._window_cpu_s = cpu_s
        self._window_end_s = now + WINDOW_S
        self.window += 1
        self._set_pause()

    def _set_pause(self) -> None:
        num_flowing = max(self._num_flowing, self._num_flowing_before)
        self.pause_s = num_flowing * self._cost_s / CPU_BUDGET

    def _set_timer(self, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = due_s
        delay_s = max(0.0, due_s - self._clock())
        self._timer = get_running_loop().call_later(delay_s, self._wake_due)

    def _wake_due(self) -> None:
        self._timer = None
        due_s = self._clock() + max(GROUP * self.pause_s, MIN_GROUP_S)
        while self._held and self._held[0][0] <= due_s:
            heapq.heappop(self._held)[2]()
        if self._held:
            self._set_timer(self._held[0][0])
