"""Both ends of a link, for a test to open and drive."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager, suppress
from queue import Empty, SimpleQueue

import uvloop
import zmq

from shared.transport import DealerLink, RouterLink

TCP = "tcp://127.0.0.1:0"
SECRET, OTHER_SECRET = b"s" * 32, b"o" * 32
TEST_LIMIT_S = 20.0
SILENCE_S = 0.4
"""How long nothing must come; a stranger's frame would take a few milliseconds."""


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run a scenario on the event loop that the scheduler uses."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(scenario(), TEST_LIMIT_S))


class Router(RouterLink):
    """A scheduler's end whose frames wait for `recv`."""

    def __init__(self, endpoint: str, **options: object) -> None:
        super().__init__(endpoint, **options)  # type: ignore[arg-type]
        self._frames: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue()
        self.start(lambda identity, frame: self._frames.put_nowait((identity, frame)), lambda: None)

    async def recv(self) -> tuple[bytes, bytes]:
        return await self._frames.get()


def router(endpoint: str = TCP, **options: object) -> closing[Router]:
    return closing(Router(endpoint, **options))


class Dealer(DealerLink):
    """A worker's end that is received from all the time, as a worker's is."""

    def __init__(self, endpoint: str, **options: object) -> None:
        super().__init__(endpoint, **options)  # type: ignore[arg-type]
        self._frames: SimpleQueue[bytes] = SimpleQueue()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._take_frames, daemon=True)
        self._thread.start()

    def receive(self, timeout_s: float) -> bytes | None:
        with suppress(Empty):
            return self._frames.get(timeout_s > 0, timeout_s)
        return None

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        super().close()

    def _take_frames(self) -> None:
        while not self._is_over.is_set():
            frame = super().receive(0.05)
            if frame is not None:
                self._frames.put(frame)


def dealer(endpoint: str, **options: object) -> closing[Dealer]:
    return closing(Dealer(endpoint, **options))


def idle_dealer(endpoint: str) -> closing[DealerLink]:
    """A worker's end that is used by the test alone."""
    return closing(DealerLink(endpoint))


@contextmanager
def plain_dealer(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    """A ZeroMQ socket that knows none of our rules."""
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(endpoint)
    try:
        yield stranger
    finally:
        context.destroy(linger=0)


async def received(link: DealerLink) -> bytes | None:
    return await asyncio.to_thread(link.receive, TEST_LIMIT_S)


async def nothing_comes(link: Router) -> bool:
    try:
        await asyncio.wait_for(link.recv(), SILENCE_S)
    except TimeoutError:
        return True
    return False
