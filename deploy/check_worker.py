"""The worker container's health: is it connected to its scheduler?

A worker listens on no port. Its link is a TCP connection that both sides keep under heartbeats, so
the kernel's table of connections says whether it stands.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_ESTABLISHED = "01"
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


def is_connected(tables: list[str], port: int) -> bool:
    """Whether a table of Linux's /proc/net/tcp format has an open connection to `port`."""
    for table in tables:
        for line in table.splitlines()[1:]:
            _, _, remote, state, *_ = line.split()
            if state == _ESTABLISHED and int(remote.rpartition(":")[2], 16) == port:
                return True
    return False


def main() -> int:
    """0 when connected."""
    endpoint = os.environ.get("QUIRE_SCHEDULER_ENDPOINT", "tcp://127.0.0.1:50053")
    port = int(endpoint.rpartition(":")[2])
    tables = [path.read_text(encoding="ascii") for path in _TABLES if path.exists()]
    connected = is_connected(tables, port)
    print("connected" if connected else f"no connection to {endpoint}")
    return 0 if connected else 1


if __name__ == "__main__":
    sys.exit(main())
