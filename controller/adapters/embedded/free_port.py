"""Allocates a port for a server that is about to start and may have to restart on the same port.

The kernel assigns the ports of its own range (32768 to 60999 on most machines) to outgoing connections. If a server's port is in
that range, the port may be in use when the server starts, or when it restarts after a kill. A client that retries before the
restart may even connect to itself. Allocated ports are therefore below that range. The allocating process also binds a socket
name for the port in Linux's abstract namespace. As long as the name is bound, no other Holdfast process allocates the same port.
"""

import contextlib
import secrets
import socket
import sys
from collections import deque
from pathlib import Path

LOWEST, HIGHEST = 10_000, 29_999  # Kubernetes uses the ports from 30000 on
TRIES = 200
NAMES_MAX = 64  # maximum number of socket names that one process binds, because each is a file descriptor
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")

_names: deque[socket.socket] = deque()


def free_port() -> int:
    """Return a free port of 127.0.0.1, which no other Holdfast process on this host allocates while this process runs.

    A process that allocates more than 64 ports reserves only the last 64.
    """
    highest = min(HIGHEST, _kernels_lowest() - 1)
    for _ in range(TRIES if highest > LOWEST else 0):
        port = LOWEST + secrets.randbelow(highest - LOWEST + 1)
        if _listens(port) or (name := _taken(port)) is None:
            continue
        _names.append(name)
        if len(_names) > NAMES_MAX:
            _names.popleft().close()
        return port
    with socket.socket() as probe:  # no port below the kernel's range is free, so use one of that range
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
    """Reserve a port for this process, and return the reservation; None if another process has reserved the port.

    The reservation is an abstract Unix socket with a name made from the port. The port itself is not bound.
    """
    name = socket.socket(socket.AF_UNIX)
    if sys.platform == "linux":
        try:
            name.bind(f"\0holdfast-port:{port}")
        except OSError:
            name.close()
            return None
    return name
