"""The link between scheduler and workers: whole frames over ZeroMQ, the only file that knows it.

    RouterLink  (scheduler, asyncio)   binds; one per scheduler; addresses workers by identity
    DealerLink  (worker, any thread)   connects and reconnects; a fresh identity for each instance

What the links promise: a frame arrives whole or not at all, in order from one sender, and neither
side ever blocks or grows without bound on a peer that does not read. What they don't: that a frame
arrives. Heartbeats, epochs and step numbers above notice what is lost.

A frame of more than `max_frame_bytes` is refused where it is sent. From a peer that sends it all
the same it is dropped and counted, and beyond twice the limit ZeroMQ closes the connection when it
reads the length, before it allocates.

With a secret the link is CURVE (RFC 26): encrypted, and both sides prove that they know the secret.
Both key pairs are derived from it, so that one file is all there is to hand out:

    root      = BLAKE2b-512(secret, person "quire-secret")
    key(role) = BLAKE2b-256(role, key=root, person "quire-curve")     role: b"router", b"dealer"
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import select
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq
from zmq.utils import z85

from shared.descriptor_reader import DescriptorReader
from shared.endpoint import Endpoint
from shared.errors import ConfigError, ProtocolError, QuireError
from shared.secret_file import check_secret

MAX_FRAME_BYTES = 64 << 20
MAX_QUEUED_FRAMES = 1000
"""Frames that wait for one peer, in either direction."""
READABLE, HAS_MORE = int(zmq.POLLIN), int(zmq.RCVMORE)
NOW, MORE_NOW = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)
"""As numbers: operations on their enumerations take longer than a call of ZeroMQ."""
LINGER_MS = 500
"""How long a closing link tries to hand over what was sent."""
PING_INTERVAL_MS, PING_TIMEOUT_MS = 2000, 10000
"""ZeroMQ's own heartbeats: they find half-open connections and make the dealer reconnect."""
RECONNECT_MS, MAX_RECONNECT_MS = 50, 2000
ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # fixed by RFC 27
ZAP_DOMAIN = b"quire"


class PeerGone(QuireError):
    """No worker has this identity, or it has not taken the last MAX_QUEUED_FRAMES frames."""


class RouterLink:
    """The scheduler's end. Build, use and close it on one event loop, which never waits for it."""

    def __init__(
        self,
        endpoint: str,
        *,
        secret: bytes | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        """Bind to `endpoint`; port 0 or * takes a free one.

        Raises ConfigError for a malformed, occupied or unprotected address and a short secret.
        """
        parsed = Endpoint.parse(endpoint)
        parsed.require_secret(secret)
        parsed.prepare_to_bind()
        self.max_frame_bytes = max_frame_bytes
        self.num_dropped = 0
        """Frames from workers that were malformed or too long."""
        self._reader: DescriptorReader | None = None
        self._zap_reader: DescriptorReader | None = None
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        _set_common_options(self._socket, parsed, max_frame_bytes)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A dealer that reconnects before its old connection is seen dead keeps its identity.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            if secret is not None:
                self._authenticate(secret)
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot listen at {endpoint}: {error.strerror}") from error
        except BaseException:
            self.close()
            raise
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where it is bound, with the actual port."""

    def start(self, take: Callable[[bytes, bytes], None], done: Callable[[], None]) -> None:
        """From now on calls `take(identity of the worker, frame)` for each frame that comes, and
        `done()` after some that came together, until close()."""

        def take_one() -> bool:
            if not _has_news(self._socket):
                return False
            parts = self._socket.recv_multipart(NOW)
            if len(parts) == 2 and len(parts[1]) <= self.max_frame_bytes:
                take(parts[0], parts[1])
            else:
                self.num_dropped += 1
            return True

        self._reader = DescriptorReader(_descriptor(self._socket), take_one, done)

    def send(self, identity: bytes, frame: bytes) -> None:
        """Queue `frame` for a worker; never waits for it.

        Raises PeerGone when the frame can't be queued, ProtocolError when it is too long.
        """
        _check_length(frame, self.max_frame_bytes)
        try:
            self._socket.send(identity, MORE_NOW)
            self._socket.send(frame, NOW)
        except zmq.Again as error:
            raise PeerGone(f"worker {identity.hex()} does not read") from error
        except zmq.ZMQError as error:
            raise PeerGone(f"worker {identity.hex()} is gone: {error.strerror}") from error
        finally:
            if self._reader is not None and _has_news(self._socket):
                self._reader.look_soon()

    def close(self) -> None:
        """Hand over what was sent, for at most LINGER_MS, and release the address."""
        for reader in (self._reader, self._zap_reader):
            if reader is not None:
                reader.close()
        self._reader = self._zap_reader = None
        self._context.destroy(linger=LINGER_MS)

    def _authenticate(self, secret: bytes) -> None:
        """Be a CURVE server that lets in only the dealers' derived key."""
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, _derived_key(secret, b"router"))
        self._socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no authenticator, no entry
        authenticator = self._context.socket(zmq.REP)
        authenticator.setsockopt(zmq.LINGER, 0)
        authenticator.bind(ZAP_ENDPOINT)
        dealer_key = z85.decode(zmq.curve_public(_derived_key(secret, b"dealer")))

        def answer_one() -> bool:
            if not _has_news(authenticator):
                return False
            question = authenticator.recv_multipart(NOW)
            authenticator.send_multipart(_zap_answer(question, dealer_key), NOW)
            return True

        self._zap_reader = DescriptorReader(_descriptor(authenticator), answer_one)


def _zap_answer(question: list[bytes], dealer_key: bytes) -> list[bytes]:
    """What to answer ZeroMQ's question (RFC 27) whether a key may enter: only `dealer_key` may."""
    version, request_id, domain, _address, _identity, mechanism, *credentials = question
    allowed = (
        (version, domain, mechanism) == (b"1.0", ZAP_DOMAIN, b"CURVE")
        and len(credentials) == 1
        and hmac.compare_digest(credentials[0], dealer_key)
    )
    status, text = (b"200", b"OK") if allowed else (b"400", b"unknown key")
    return [b"1.0", request_id, status, text, b"", b""]


class DealerLink:
    """A worker's end: any thread sends, one receives.

    The socket is used by whoever holds the lock, so that nothing stands between a step and the
    wire. Frames that ZeroMQ does not take, as while there is no connection, wait until somebody
    sends or receives; of more than MAX_QUEUED_FRAMES the oldest are dropped. What is sent after
    close() goes nowhere.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        secret: bytes | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        """Start to connect to `endpoint`, which need not be there yet.

        Raises ConfigError for a malformed or unprotected address and a short secret.
        """
        parsed = Endpoint.parse(endpoint)
        parsed.require_secret(secret)
        self.endpoint = endpoint
        self.max_frame_bytes = max_frame_bytes
        self.num_dropped = 0
        """Frames that were malformed, too long or, of those to be sent, too many."""
        self._lock = threading.Lock()
        """Guards all that follows."""
        self._outgoing: deque[bytes] = deque()
        self._is_waiting = False
        """Whether the receiver waits, and was not woken."""
        self._is_closed = False
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        try:
            self._connect(parsed, secret)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"cannot connect to {endpoint}: {error.strerror}") from error
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wake_reader, self._wake_writer = os.pipe()
        self._news = select.poll()
        self._news.register(_descriptor(self._socket), select.POLLIN)
        self._news.register(self._wake_reader, select.POLLIN)

    def send(self, frame: bytes) -> None:
        """Queue `frame`; from any thread, never waits. ProtocolError when it is too long."""
        _check_length(frame, self.max_frame_bytes)
        with self._lock:
            if self._is_closed:
                return
            if len(self._outgoing) == MAX_QUEUED_FRAMES:
                self._outgoing.popleft()
                self.num_dropped += 1
            self._outgoing.append(frame)
            self._send_frames()
            if self._is_waiting:  # for news that the socket may have told this thread, once
                self._is_waiting = False
                os.write(self._wake_writer, b"\0")

    def receive(self, timeout_s: float) -> bytes | None:
        """The next frame, or None when none came within `timeout_s` seconds."""
        end_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._send_frames()
                frame = self._take_frame()
                left_s = end_s - time.monotonic()
                if frame is not None or left_s <= 0:
                    return frame
                self._is_waiting = True
            try:
                self._news.poll(left_s * 1000)
            finally:
                with self._lock:
                    if not self._is_waiting:
                        os.read(self._wake_reader, 1)
                    self._is_waiting = False

    def close(self) -> None:
        """Hand over what was sent, for at most twice LINGER_MS, and release the socket. Nobody
        receives meanwhile or afterwards."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            deadline_s = time.monotonic() + LINGER_MS / 1000
            self._send_frames()
            while self._outgoing and (left_s := deadline_s - time.monotonic()) > 0:
                self._socket.poll(int(left_s * 1000) + 1, zmq.POLLOUT)
                self._send_frames()
            self._context.destroy(linger=LINGER_MS)
            os.close(self._wake_reader)
            os.close(self._wake_writer)

    def _connect(self, endpoint: Endpoint, secret: bytes | None) -> None:
        _set_common_options(self._socket, endpoint, self.max_frame_bytes)
        # After a restart under an old identity a ROUTER may still hold the dead connection.
        self._socket.setsockopt(zmq.ROUTING_ID, b"q" + secrets.token_bytes(15))
        # Queue only for a live connection, so that what waits while there is none waits here.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        if secret is not None:
            key = _derived_key(secret, b"dealer")
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, key)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(key))
            self._socket.setsockopt(
                zmq.CURVE_SERVERKEY, zmq.curve_public(_derived_key(secret, b"router"))
            )
        self._socket.connect(endpoint.text)

    def _take_frame(self) -> bytes | None:
        while True:
            try:
                frame = self._socket.recv(NOW)
            except zmq.Again:
                return None
            if not self._socket.getsockopt(HAS_MORE):
                if len(frame) <= self.max_frame_bytes:
                    return frame
            else:
                self._socket.recv_multipart(NOW)
            self.num_dropped += 1

    def _send_frames(self) -> None:
        """Hand queued frames to ZeroMQ until none is left or it takes no more."""
        with contextlib.suppress(zmq.Again):
            while self._outgoing:
                self._socket.send(self._outgoing[0], NOW)
                self._outgoing.popleft()


def _set_common_options(
    socket: zmq.Socket[bytes], endpoint: Endpoint, max_frame_bytes: int
) -> None:
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_FRAMES)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_FRAMES)
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * max_frame_bytes)
    socket.setsockopt(zmq.HEARTBEAT_IVL, PING_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, PING_TIMEOUT_MS)
    if endpoint.host is not None and ":" in endpoint.host:
        socket.setsockopt(zmq.IPV6, 1)


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    """It can be read when the socket may have news."""
    return int(socket.getsockopt(zmq.FD))


def _has_news(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message has come."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & READABLE)


def _check_length(frame: bytes, max_frame_bytes: int) -> None:
    if len(frame) > max_frame_bytes:
        raise ProtocolError(f"a frame of {len(frame)} bytes is over the limit {max_frame_bytes}")


def _derived_key(secret: bytes, role: bytes) -> bytes:
    """The secret Curve25519 key of a role, as Z85 text; see the top of the file."""
    check_secret(secret, "of the worker plane")
    root = hashlib.blake2b(secret, person=b"quire-secret").digest()
    key = hashlib.blake2b(role, digest_size=32, key=root, person=b"quire-curve").digest()
    return z85.encode(key)
