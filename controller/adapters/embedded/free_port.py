"""Allocates a port for a server that is about to start, and may have to restart on it.

The kernel assigns the ports of its own range (32768 to 60999 on most machines) to outgoing connections. A server on such a port
can find it taken when it starts, and again when it restarts after a kill; a client that retries meanwhile can even connect to
itself. So these ports lie below that range. The process that allocates one also binds its name in Linux's abstract namespace, so
that no other process of ours gets the same port, whether or not a server listens there yet.
"""

import contextlib
import secrets
import socket
import sys
from collections import deque
from pathlib import Path

LOWEST, HIGHEST = 10_000, 29_999  # Kubernetes uses the ports above
TRIES = 200
NAMES_MAX = 64  # names that one process holds: each is a file descriptor
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")

_names: deque[socket.socket] = deque()


def free_port() -> int:
    """Return a free port of 127.0.0.1 that is allocated to no other process here while this one lives."""
    highest = min(HIGHEST, _kernels_lowest() - 1)
    for _ in range(TRIES if highest > LOWEST else 0):
        port = LOWEST + secrets.randbelow(highest - LOWEST + 1)
        if _listens(port) or (name := _taken(port)) is None:
            continue
        _names.append(name)
        if len(_names) > NAMES_MAX:
            _names.popleft().close()
        return port
    with socket.socket() as probe:  # the kernel's own range includes the ports from LOWEST on
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _kernels_lowest() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(RANGE.read_text().split()[0])
    return HIGHEST + 1


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def _taken(port: int) -> socket.socket | None:
    """Bind the port's name; return None if another process holds it."""
    name = socket.socket(socket.AF_UNIX)
    if sys.platform == "linux":
        try:
            name.bind(f"\0holdfast-port:{port}")
        except OSError:
            name.close()
            return None
    return name
