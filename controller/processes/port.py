"""Reserves the port that a fleet's frontends share, because the kernel would let two fleets share it."""

import errno
import socket
import sys

from events.errors import HoldfastError


class PortTaken(HoldfastError):
    """The port is in use by another process. Stop that process, or choose another port with --port."""


def hold(host: str, port: int) -> socket.socket:
    """Return a socket that, while open, keeps any other `holdfast up` off this port. Raise PortTaken or HoldfastError."""
    held = _name(host, port)
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        held.close()
        raise _refusal(host, port, error) from error
    return held


def _name(host: str, port: int) -> socket.socket:
    """Bind a name for the port in Linux's abstract namespace: a name has one owner, and is freed when the owner dies."""
    held = socket.socket(socket.AF_UNIX)
    if sys.platform == "linux":
        try:
            held.bind(f"\0holdfast:{host}:{port}")
        except OSError as error:
            held.close()
            raise _refusal(host, port, error) from error
    return held


def _refusal(host: str, port: int, error: OSError) -> HoldfastError:
    if error.errno == errno.EADDRINUSE:
        return PortTaken(f"{host}:{port} cannot be used: {PortTaken.__doc__}")
    return HoldfastError(f"{host}:{port} cannot be used: {error.strerror}")
