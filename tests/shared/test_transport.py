"""Frames pass whole between the links; garbage, strangers and the deaf do no harm."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvloop
import zmq

from shared.errors import ConfigError, ProtocolError
from shared.transport import (
    MAX_QUEUED_FRAMES,
    DealerLink,
    PeerGone,
    RouterLink,
    _derived_key,
)

TCP = "tcp://127.0.0.1:0"
SECRET, OTHER_SECRET = b"s" * 32, b"o" * 32
TEST_LIMIT_S = 20.0
SILENCE_S = 0.4
"""How long nothing must come; a stranger's frame would take a few milliseconds."""


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run a scenario on the event loop that the scheduler uses."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(scenario(), TEST_LIMIT_S))


@contextmanager
def router(endpoint: str = TCP, **options: object) -> Iterator[RouterLink]:
    link = RouterLink(endpoint, **options)  # type: ignore[arg-type]
    try:
        yield link
    finally:
        link.close()


@contextmanager
def dealer(endpoint: str, **options: object) -> Iterator[DealerLink]:
    link = DealerLink(endpoint, **options)  # type: ignore[arg-type]
    try:
        yield link
    finally:
        link.close()


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


async def nothing_comes(link: RouterLink) -> bool:
    try:
        await asyncio.wait_for(link.recv(), SILENCE_S)
    except TimeoutError:
        return True
    return False


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_frames_go_both_ways_in_order(tmp_path: Path, scheme: str, secret: bytes | None) -> None:
    endpoint = TCP if scheme == "tcp" else f"ipc://{tmp_path}/run/workers"
    frames = [b"", b"x", bytes(range(256)) * 4096]

    async def scenario() -> None:
        with (
            router(endpoint, secret=secret) as server,
            dealer(server.endpoint, secret=secret) as worker,
        ):
            for frame in frames:
                worker.send(frame)
            got = [await server.recv() for _ in frames]
            assert [frame for _, frame in got] == frames
            (identity,) = {identity for identity, _ in got}
            for frame in frames:
                await server.send(identity, frame)
            assert [await received(worker) for _ in frames] == frames
            assert (server.num_dropped, worker.num_dropped) == (0, 0)

    run(scenario)


def test_each_instance_has_an_identity_of_its_own() -> None:
    async def scenario() -> None:
        with router() as server, dealer(server.endpoint) as one, dealer(server.endpoint) as two:
            one.send(b"1")
            two.send(b"2")
            first, second = await server.recv(), await server.recv()
            assert first[0] != second[0]
            await server.send(dict([first[::-1], second[::-1]])[b"2"], b"to two")
            assert await received(two) == b"to two"
            assert one.receive(0) is None

    run(scenario)


def test_any_thread_may_send() -> None:
    async def scenario() -> None:
        with router() as server, dealer(server.endpoint) as worker:

            def send_many(mark: bytes) -> None:
                for _ in range(100):
                    worker.send(mark)

            threads = [
                threading.Thread(target=send_many, args=(mark,)) for mark in (b"a", b"b", b"c")
            ]
            for thread in threads:
                thread.start()
            got = sorted([(await server.recv())[1] for _ in range(300)])
            assert got == [b"a"] * 100 + [b"b"] * 100 + [b"c"] * 100
            for thread in threads:
                thread.join()

    run(scenario)


def test_receive_waits_no_longer_than_told() -> None:
    with dealer("tcp://127.0.0.1:9") as worker:
        assert worker.receive(0) is None
        assert worker.receive(0.01) is None


@pytest.mark.parametrize("secret", [OTHER_SECRET, None])
def test_a_wrong_secret_and_a_plain_socket_get_nothing_through(secret: bytes | None) -> None:
    """FIELD-FAILURES: plan broadcasts readable by anyone."""

    async def scenario() -> None:
        with router(secret=SECRET) as server, dealer(server.endpoint, secret=secret) as stranger:
            stranger.send(b"let me in")
            assert await nothing_comes(server)
            with dealer(server.endpoint, secret=SECRET) as worker:
                worker.send(b"hello")
                assert (await server.recv())[1] == b"hello"
            assert stranger.receive(0) is None

    run(scenario)


def test_a_dealer_with_a_secret_says_nothing_to_a_router_without_it() -> None:
    """The worker checks the scheduler as well."""

    async def scenario() -> None:
        for secret in (OTHER_SECRET, None):
            with (
                router(secret=secret) as impostor,
                dealer(impostor.endpoint, secret=SECRET) as worker,
            ):
                worker.send(b"my name")
                assert await nothing_comes(impostor)

    run(scenario)


def test_knowing_the_public_key_of_the_router_is_not_enough() -> None:
    """CURVE by itself lets in every client that knows the server's public key; ours must not."""

    async def scenario() -> None:
        server_key = zmq.curve_public(_derived_key(SECRET, b"router"))
        public, private = zmq.curve_keypair()
        with router(secret=SECRET) as server, zmq.Context() as context:
            stranger = context.socket(zmq.DEALER)
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.setsockopt(zmq.CURVE_PUBLICKEY, public)
            stranger.setsockopt(zmq.CURVE_SECRETKEY, private)
            stranger.setsockopt(zmq.CURVE_SERVERKEY, server_key)
            stranger.connect(server.endpoint)
            stranger.send(b"let me in")
            assert await nothing_comes(server)
            stranger.close()

    run(scenario)


@pytest.mark.parametrize("secret", [b"", b"short"])
def test_an_empty_or_short_secret_is_refused(secret: bytes) -> None:
    """FIELD-FAILURES: an empty default secret that switched the check off."""

    async def scenario() -> None:
        with pytest.raises(ConfigError, match="secret"):
            RouterLink(TCP, secret=secret)
        with pytest.raises(ConfigError, match="secret"):
            DealerLink("tcp://127.0.0.1:9", secret=secret)

    run(scenario)


def test_beyond_this_machine_a_secret_is_demanded() -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigError, match="needs a shared secret"):
            RouterLink("tcp://0.0.0.0:0")
        with pytest.raises(ConfigError, match="needs a shared secret"):
            DealerLink("tcp://scheduler:5555")
        with router("tcp://0.0.0.0:0", secret=SECRET) as server:
            assert server.endpoint.startswith("tcp://0.0.0.0:")

    run(scenario)


def test_multipart_and_long_frames_are_dropped_and_counted() -> None:
    """FIELD-FAILURES: truncated and huge frames."""

    async def scenario() -> None:
        with router(max_frame_bytes=100) as server, plain_dealer(server.endpoint) as stranger:
            stranger.send_multipart([b"two", b"parts"])
            stranger.send(b"x" * 101)
            stranger.send(b"x" * 100)
            assert (await server.recv())[1] == b"x" * 100
            assert server.num_dropped == 2

    run(scenario)


def test_a_huge_frame_ends_only_the_connection_that_sent_it() -> None:
    async def scenario() -> None:
        with (
            router(max_frame_bytes=100) as server,
            plain_dealer(server.endpoint) as stranger,
            dealer(server.endpoint) as worker,
        ):
            stranger.send(b"x" * 10_000)
            worker.send(b"still here")
            assert (await server.recv())[1] == b"still here"
            assert await nothing_comes(server)

    run(scenario)


def test_a_frame_over_the_limit_is_refused_where_it_is_sent() -> None:
    async def scenario() -> None:
        with (
            router(max_frame_bytes=10) as server,
            dealer(server.endpoint, max_frame_bytes=10) as worker,
        ):
            with pytest.raises(ProtocolError, match="11 bytes"):
                worker.send(b"x" * 11)
            with pytest.raises(ProtocolError, match="11 bytes"):
                await server.send(b"anyone", b"x" * 11)

    run(scenario)


def test_to_nobody_and_to_a_peer_that_left_is_an_error() -> None:
    async def scenario() -> None:
        with router() as server:
            with pytest.raises(PeerGone):
                await server.send(b"nobody", b"x")
            with dealer(server.endpoint) as worker:
                worker.send(b"hello")
                identity, _ = await server.recv()
            with pytest.raises(PeerGone):
                while True:
                    await server.send(identity, b"x")
                    await asyncio.sleep(0.01)

    run(scenario)


def test_a_peer_that_does_not_read_blocks_nobody() -> None:
    """FIELD-FAILURES: a worker hangs; memory stays flat."""

    async def scenario() -> None:
        with router() as server, plain_dealer(server.endpoint) as deaf:
            deaf.send(b"hello")
            identity, _ = await server.recv()
            with pytest.raises(PeerGone, match="does not read"):
                for _ in range(20 * MAX_QUEUED_FRAMES):
                    await server.send(identity, bytes(50_000))
            with dealer(server.endpoint) as worker:
                worker.send(b"and I?")
                identity, _ = await server.recv()
                await server.send(identity, b"you as well")
                assert await received(worker) == b"you as well"

    run(scenario)


def test_the_worker_may_start_first() -> None:
    """FIELD-FAILURES: either start order works."""

    async def scenario() -> None:
        with router() as server:
            endpoint = server.endpoint
        with dealer(endpoint) as worker:
            worker.send(b"early")
            await asyncio.sleep(0.1)
            with router(endpoint) as server:
                assert (await server.recv())[1] == b"early"

    run(scenario)


def test_a_worker_comes_back_to_a_scheduler_that_restarted() -> None:
    """FIELD-FAILURES: workers started apart reconnect to its successor."""

    async def scenario() -> None:
        with router() as server:
            endpoint = server.endpoint
            worker = DealerLink(endpoint)
            worker.send(b"one")
            before, _ = await server.recv()
        try:
            for text in (b"two", b"three"):
                with router(endpoint) as server:
                    frame = b""
                    while frame != text:
                        worker.send(text)
                        try:
                            identity, frame = await asyncio.wait_for(server.recv(), 0.2)
                        except TimeoutError:
                            continue
                    assert identity == before
                    await server.send(identity, b"welcome " + text)
                    while (answer := await received(worker)) != b"welcome " + text:
                        assert answer is not None
        finally:
            worker.close()

    run(scenario)


def test_while_there_is_no_scheduler_the_oldest_frames_go() -> None:
    with dealer("tcp://127.0.0.1:9") as worker:
        for number in range(MAX_QUEUED_FRAMES + 5):
            worker.send(b"%d" % number)
        assert worker.num_dropped == 5


def test_what_was_sent_before_close_arrives() -> None:
    async def scenario() -> None:
        with router() as server:
            with dealer(server.endpoint) as worker:
                worker.send(b"hello")
                identity, _ = await server.recv()
                worker.send(b"goodbye")
            assert await server.recv() == (identity, b"goodbye")
            worker.close()
            worker.send(b"too late")
            assert await nothing_comes(server)

    run(scenario)


def test_an_occupied_address_is_a_config_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        with router() as server, pytest.raises(ConfigError, match="cannot listen"):
            RouterLink(server.endpoint)
        ipc = f"ipc://{tmp_path}/run/workers"
        with router(ipc), pytest.raises(ConfigError, match="another process listens"):
            RouterLink(ipc)
        with router(ipc):
            pass

    run(scenario)


def test_malformed_addresses_are_config_errors() -> None:
    async def scenario() -> None:
        for endpoint in ("nonsense", "tcp://nowhere.invalid.:x"):
            with pytest.raises(ConfigError):
                RouterLink(endpoint)
            with pytest.raises(ConfigError):
                DealerLink(endpoint)

    run(scenario)
