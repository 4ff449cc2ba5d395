"""Frames on the pipes between the scheduler and its helper processes: a length of four bytes,
lowest first, and so many bytes."""

from __future__ import annotations

import math
import select
import struct
import time
from io import FileIO
from typing import IO

MAX_FRAME_BYTES = 1 << 28

Pipe = IO[bytes] | FileIO


def write_frame(pipe: Pipe, content: bytes) -> None:
    """Writes one frame. Raises OSError when the other side is gone."""
    left = memoryview(struct.pack("<I", len(content)) + content)
    while left:
        left = left[pipe.write(left) :]


def read_frame(pipe: Pipe, deadline_s: float = math.inf) -> bytes | None:
    """A frame; None when the other side is gone, or `time.monotonic()` passes the deadline."""
    poller = select.poll()  # unlike select, it takes any number of open files
    poller.register(pipe, select.POLLIN)
    content, size = b"", 4
    while len(content) < size:
        left_s = deadline_s - time.monotonic()
        left_ms = None if math.isinf(left_s) else max(0.0, 1000 * left_s)
        part = pipe.read(size - len(content)) if poller.poll(left_ms) else b""
        if not part:
            return None
        content += part
        if len(content) == 4 and size == 4:
            size += min(struct.unpack("<I", content)[0], MAX_FRAME_BYTES)
    return content[4:]
