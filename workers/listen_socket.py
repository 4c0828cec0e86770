"""Opens listening sockets without the event loop.

The event loop is not used because uvloop would keep four threads to resolve host names.
"""

import socket

BACKLOG = 1024


def listening(host: str, port: int) -> socket.socket:
    """Return a TCP socket that listens on this address. Raise OSError if the address cannot be bound."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    return socket.create_server((str(address[0]), port), family=socket.AddressFamily(family), backlog=BACKLOG)
