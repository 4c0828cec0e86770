"""A port for a server that is about to start, and may have to start there again.

The kernel gives the ports of its own range (32768 to 60999 on most machines) to whoever connects to anything. A server on such
a port can find it taken when it starts, and again when it was killed and comes back; a client that keeps trying to reach it
meanwhile can even be connected to itself. So these ports lie below that range. Who was given one also takes its name in
Linux's abstract namespace, so that no other process of ours is given the same, whether or not anybody listens there yet.
"""

import contextlib
import secrets
import socket
import sys
from collections import deque
from pathlib import Path

LOWEST, HIGHEST = 10_000, 29_999  # Kubernetes has what is above
TRIES = 200
NAMES_MAX = 64  # that one process keeps: each is a file descriptor
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")

_names: deque[socket.socket] = deque()


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nobody listens, and which nobody else is given here while this process lives."""
    highest = min(HIGHEST, _kernels_lowest() - 1)
    for _ in range(TRIES if highest > LOWEST else 0):
        port = LOWEST + secrets.randbelow(highest - LOWEST + 1)
        if _listens(port) or (name := _taken(port)) is None:
            continue
        _names.append(name)
        if len(_names) > NAMES_MAX:
            _names.popleft().close()
        return port
    with socket.socket() as probe:  # the kernel's own range reaches down here
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
    """Take the port's name; None where another process has it."""
    name = socket.socket(socket.AF_UNIX)
    if sys.platform == "linux":
        try:
            name.bind(f"\0holdfast-port:{port}")
        except OSError:
            name.close()
            return None
    return name
