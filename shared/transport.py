"""The link between scheduler and workers: whole frames over ZeroMQ, the only file that knows it.

    RouterLink  (scheduler, asyncio)   binds; one per scheduler; addresses workers by identity
    DealerLink  (worker, threads)      connects and reconnects; a fresh identity for each instance

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
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue

import zmq
from zmq.utils import z85

from shared.descriptor_reader import DescriptorReader
from shared.endpoint import Endpoint
from shared.errors import ConfigError, ProtocolError, QuireError
from shared.secret_file import check_secret

MAX_FRAME_BYTES = 64 << 20
MAX_QUEUED_FRAMES = 1000
"""Frames that wait for one peer, in either direction."""
READABLE, NOW, MORE_NOW = int(zmq.POLLIN), int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)
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
    """A worker's end: a thread owns the socket; any thread sends, one receives.

    Frames sent while there is no connection wait; of more than MAX_QUEUED_FRAMES the oldest are
    dropped. What is sent after close() goes nowhere.
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
        """Frames that were malformed, too long or, in either direction, too many."""
        self._lock = threading.Lock()
        """Guards `_outgoing`, `_is_closing` and the life of the wake-up pipe."""
        self._outgoing: deque[bytes] = deque()
        self._incoming: SimpleQueue[bytes] = SimpleQueue()
        self._is_closing = False
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
        # Sockets belong to one thread, so senders wake it up through a pipe.
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._thread = threading.Thread(target=self._run, name="quire-dealer", daemon=True)
        self._thread.start()

    def send(self, frame: bytes) -> None:
        """Queue `frame`; from any thread, never waits. ProtocolError when it is too long."""
        _check_length(frame, self.max_frame_bytes)
        with self._lock:
            if self._is_closing:
                return
            if len(self._outgoing) == MAX_QUEUED_FRAMES:
                self._outgoing.popleft()
                self.num_dropped += 1
            self._outgoing.append(frame)
            self._wake()

    def receive(self, timeout_s: float) -> bytes | None:
        """The next frame, or None when none came within `timeout_s` seconds."""
        try:
            return (
                self._incoming.get(timeout=timeout_s)
                if timeout_s > 0
                else (self._incoming.get_nowait())
            )
        except Empty:
            return None

    def close(self) -> None:
        """Hand over what was sent, for at most twice LINGER_MS, and stop the thread."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            self._wake()
        self._thread.join()
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

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full of wake-ups already
            os.write(self._wake_writer, b"\0")

    def _run(self) -> None:
        """The I/O thread: move frames both ways until close()."""
        poller = zmq.Poller()
        poller.register(self._wake_reader, zmq.POLLIN)
        while not self._is_closing:
            blocked = bool(self._outgoing)
            poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if blocked else 0))
            events = dict(poller.poll())
            if self._wake_reader in events:
                os.read(self._wake_reader, 4096)
            if events.get(self._socket, 0) & zmq.POLLIN:
                self._take_frames()
            self._send_frames()
        deadline_s = time.monotonic() + LINGER_MS / 1000
        while self._outgoing and (left_s := deadline_s - time.monotonic()) > 0:
            if self._socket.poll(int(left_s * 1000) + 1, zmq.POLLOUT):
                self._send_frames()
        self._context.destroy(linger=LINGER_MS)

    def _take_frames(self) -> None:
        """Move what has arrived to the receiver's queue."""
        for _ in range(MAX_QUEUED_FRAMES):
            try:
                parts = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            fits = len(parts) == 1 and len(parts[0]) <= self.max_frame_bytes
            if fits and self._incoming.qsize() < MAX_QUEUED_FRAMES:
                self._incoming.put(parts[0])
            else:
                self.num_dropped += 1

    def _send_frames(self) -> None:
        """Hand queued frames to ZeroMQ until none is left or it takes no more."""
        with self._lock, contextlib.suppress(zmq.Again):
            while self._outgoing:
                self._socket.send(self._outgoing[0], zmq.DONTWAIT)
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
