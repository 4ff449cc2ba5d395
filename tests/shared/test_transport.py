"""Frames pass whole between the links, and the deaf and the late do no harm."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path

import pytest

from shared.errors import ConfigError, ProtocolError
from shared.transport import MAX_QUEUED_FRAMES, DealerLink, PeerGone, RouterLink
from tests.shared.links import (
    SECRET,
    TCP,
    Dealer,
    Router,
    dealer,
    idle_dealer,
    nothing_comes,
    plain_dealer,
    received,
    router,
    run,
)


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
                server.send(identity, frame)
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
            server.send(dict([first[::-1], second[::-1]])[b"2"], b"to two")
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


def test_what_comes_while_the_scheduler_sends_is_taken() -> None:
    """A send may be what hears of frames that came: the descriptor tells of them only once."""

    async def scenario() -> None:
        with router() as server, dealer(server.endpoint) as worker:
            worker.send(b"hello")
            identity, _ = await server.recv()
            for number in range(300):
                worker.send(b"%d" % number)
                for _ in range(number % 3):
                    server.send(identity, b"x")
                assert await server.recv() == (identity, b"%d" % number)

    run(scenario)


def test_a_send_hides_no_news_from_a_receiver_that_waits() -> None:
    """The descriptor tells of news once, and may tell a thread that sends."""

    async def scenario() -> None:
        with router() as server, idle_dealer(server.endpoint) as worker:
            worker.send(b"hello")
            await asyncio.to_thread(worker.receive, 0.0)
            while (identity := await _next_identity(server)) is None:
                await asyncio.to_thread(worker.receive, 0.01)
            for number in range(600):
                waiting = asyncio.create_task(received(worker))
                await asyncio.sleep(0.002)  # then a send looks for news
                server.send(identity, b"%d" % number)
                await asyncio.sleep(0.00001 * (number % 30))
                worker.send(b"beat")
                assert await waiting == b"%d" % number

    run(scenario)


async def _next_identity(server: Router) -> bytes | None:
    try:
        return (await asyncio.wait_for(server.recv(), 0.05))[0]
    except TimeoutError:
        return None


def test_what_waits_for_a_connection_goes_with_what_is_sent_later() -> None:
    async def scenario() -> None:
        with router() as server:
            endpoint = server.endpoint
        with idle_dealer(endpoint) as worker:
            worker.send(b"0")
            with router(endpoint) as server:
                first, number = None, 0
                while first is None:
                    number += 1
                    worker.send(b"%d" % number)
                    with contextlib.suppress(TimeoutError):
                        first = await asyncio.wait_for(server.recv(), 0.05)
                got = [first, *[await server.recv() for _ in range(number)]]
                assert [frame for _, frame in got] == [b"%d" % i for i in range(number + 1)]

    run(scenario)


def test_receive_waits_no_longer_than_told() -> None:
    with idle_dealer("tcp://127.0.0.1:9") as worker:
        assert worker.receive(0) is None
        assert worker.receive(0.01) is None


def test_a_frame_over_the_limit_is_refused_where_it_is_sent() -> None:
    async def scenario() -> None:
        with (
            router(max_frame_bytes=10) as server,
            dealer(server.endpoint, max_frame_bytes=10) as worker,
        ):
            with pytest.raises(ProtocolError, match="11 bytes"):
                worker.send(b"x" * 11)
            with pytest.raises(ProtocolError, match="11 bytes"):
                server.send(b"anyone", b"x" * 11)

    run(scenario)


def test_to_nobody_and_to_a_peer_that_left_is_an_error() -> None:
    async def scenario() -> None:
        with router() as server:
            with pytest.raises(PeerGone):
                server.send(b"nobody", b"x")
            with dealer(server.endpoint) as worker:
                worker.send(b"hello")
                identity, _ = await server.recv()
            with pytest.raises(PeerGone):
                while True:
                    server.send(identity, b"x")
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
                    server.send(identity, bytes(50_000))
            with dealer(server.endpoint) as worker:
                worker.send(b"and I?")
                identity, _ = await server.recv()
                server.send(identity, b"you as well")
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
            worker = Dealer(endpoint)
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
                    server.send(identity, b"welcome " + text)
                    while (answer := await received(worker)) != b"welcome " + text:
                        assert answer is not None
        finally:
            worker.close()

    run(scenario)


def test_while_there_is_no_scheduler_the_oldest_frames_go() -> None:
    with idle_dealer("tcp://127.0.0.1:9") as worker:
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
