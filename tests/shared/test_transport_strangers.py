"""Who has no secret, or sends what no link sends, gets nothing through and harms nobody."""

from __future__ import annotations

import pytest
import zmq

from shared.errors import ConfigError
from shared.transport import DealerLink, RouterLink, _derived_key
from tests.shared.links import (
    OTHER_SECRET,
    SECRET,
    TCP,
    dealer,
    nothing_comes,
    plain_dealer,
    router,
    run,
)


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
