"""Generate calls read as raw HTTP/2: what reaches the client's socket, and when.

A client library costs as much for a message as the server does, and would be measured with it. This
one looks at frame headers alone while the load runs; messages are taken apart afterwards.

    connect    preface, SETTINGS and WINDOW_UPDATE that lift all flow control (RFC 9113)
    open       HEADERS and one DATA frame per call, without header compression (RFC 7541, 6.2.2)
    read       every DATA frame is kept with the time of its receipt; pings are answered
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_WINDOW = (1 << 31) - 1
DEFAULT_WINDOW = 65_535
DATA, HEADERS, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 4, 6, 7, 8
ACK = END_STREAM = 1
END_HEADERS = 4
PADDED = 8
INITIAL_WINDOW_SIZE = 4
FRAME_HEADER_BYTES = 9
READ_BYTES = 1 << 18
PAUSE_S = 0.001
"""Between two looks at the sockets. A reader that waits in the kernel would be woken by each
message at the sender's expense, as no client on another machine is."""


class StreamEnded(Exception):
    """The server ended a call, or closed a connection."""


class _Connection:
    """One HTTP/2 connection and the DATA that came over it."""

    def __init__(self, address: str, path: str) -> None:
        host, _, port = address.rpartition(":")
        self._authority = address
        self._path = path
        self.socket = socket.create_connection((host.strip("[]"), int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._next_id = 1
        self._rest = b""
        self.data: list[tuple[float, int, bytes]] = []
        """(seconds of CLOCK_MONOTONIC, stream id, payload) of each DATA frame, in order."""
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, MAX_WINDOW)
        window = struct.pack(">I", MAX_WINDOW - DEFAULT_WINDOW)
        self.socket.sendall(
            PREFACE + _frame(SETTINGS, 0, 0, settings) + _frame(WINDOW_UPDATE, 0, 0, window)
        )

    def open(self, message: bytes) -> None:
        """Starts a call with one request."""
        headers = (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", self._path.encode()),
            (b":authority", self._authority.encode()),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
        )
        block = b"".join(_literal(name, value) for name, value in headers)
        body = struct.pack(">BI", 0, len(message)) + message
        self.socket.sendall(
            _frame(HEADERS, END_HEADERS, self._next_id, block)
            + _frame(DATA, END_STREAM, self._next_id, body)
        )
        self._next_id += 2

    def read(self) -> None:
        """Takes what the socket has. Raises StreamEnded when a call ended."""
        received = self.socket.recv(READ_BYTES)
        now = time.monotonic()
        if not received:
            raise StreamEnded("the server closed the connection")
        buffer = self._rest + received
        start = 0
        while len(buffer) - start >= FRAME_HEADER_BYTES:
            high, low, kind, flags, stream = struct.unpack_from(">BHBBI", buffer, start)
            end = start + FRAME_HEADER_BYTES + (high << 16 | low)
            if end > len(buffer):
                break
            self._take(now, kind, flags, stream, buffer[start + FRAME_HEADER_BYTES : end])
            start = end
        self._rest = buffer[start:]

    def _take(self, now: float, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA:
            assert not flags & PADDED, "gRPC pads nothing"
            self.data.append((now, stream, payload))
        elif kind == SETTINGS and not flags & ACK:
            self.socket.sendall(_frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            self.socket.sendall(_frame(PING, ACK, 0, payload))
        elif kind == GOAWAY or (kind == HEADERS and flags & END_STREAM):
            raise StreamEnded(f"stream {stream} ended: {payload!r}")


class RawStreams:
    """Calls over some connections, read in one thread. Close it at the end."""

    def __init__(self, address: str, path: str, num_connections: int) -> None:
        """`path` is that of the method, "/package.Service/Method"."""
        self._connections = [_Connection(address, path) for _ in range(num_connections)]
        self._selector = selectors.DefaultSelector()
        for connection in self._connections:
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        self._num_open = 0

    def open(self, message: bytes) -> None:
        """Starts a call with one serialized request, on the next connection in turn."""
        self._connections[self._num_open % len(self._connections)].open(message)
        self._num_open += 1

    def read(self, timeout_s: float) -> None:
        """Takes what comes, after waiting up to `timeout_s` seconds for something."""
        for key, _ in self._selector.select(timeout_s):
            key.data.read()
        time.sleep(PAUSE_S)

    def num_with_frames(self, num_frames: int) -> int:
        """How many calls have had at least so many DATA frames."""
        counts: dict[tuple[int, int], int] = {}
        for number, connection in enumerate(self._connections):
            for _, stream, _ in connection.data:
                counts[number, stream] = counts.get((number, stream), 0) + 1
        return sum(count >= num_frames for count in counts.values())

    def messages(self) -> Iterator[tuple[float, int, bytes]]:
        """(time of receipt of its end, call, serialized message) of all that came; a call's
        messages are in order."""
        for number, connection in enumerate(self._connections):
            partial: dict[int, bytes] = {}
            for received_s, stream, payload in connection.data:
                buffer = partial.get(stream, b"") + payload
                while len(buffer) >= 5 and len(buffer) >= 5 + int.from_bytes(buffer[1:5]):
                    end = 5 + int.from_bytes(buffer[1:5])
                    call = stream // 2 * len(self._connections) + number
                    yield received_s, call, buffer[5:end]
                    buffer = buffer[end:]
                partial[stream] = buffer

    def close(self) -> None:
        """Breaks all calls off."""
        self._selector.close()
        for connection in self._connections:
            connection.socket.close()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    length = len(payload)
    return struct.pack(">BHBBI", length >> 16, length & 0xFFFF, kind, flags, stream) + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """A header field without indexing and without Huffman coding; both parts are short."""
    assert len(name) < 127 and len(value) < 127
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
