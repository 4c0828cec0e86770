"""Which clients have how many connections to this port? No more than there may be, of all and of one address.

Who is let in is counted until he leaves, whoever has his connection meanwhile: the fast path hands it over to aiohttp. Who
is not is told so at once, with a status that any client understands, and costs nothing more.
"""

import asyncio
from collections import Counter
from collections.abc import Callable

from controller.frontend.errors import ApiError
from controller.frontend.settings import ConnectionSettings

RETRY_AFTER_S = 1


class OpenConnections:
    """The connections of one port, by their clients' addresses."""

    def __init__(self, settings: ConnectionSettings, refused: Callable[[str], object]) -> None:
        """`refused` is told of each connection that is turned away or ended, by the bound."""
        self.settings = settings
        self.refused = refused
        self._by_address: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._by_address.total()

    def enter(self, transport: asyncio.Transport) -> bool:
        """Let a connection in, or tell it why not and close it."""
        address, settings = address_of(transport), self.settings
        if settings.per_address_max and self._by_address[address] >= settings.per_address_max:
            self.refused("connections_of_address")
            why = f"there are {settings.per_address_max} connections of this address already"
        elif settings.total_max and len(self) >= settings.total_max:
            self.refused("connections")
            why = f"there are {settings.total_max} connections already"
        else:
            self._by_address[address] += 1
            return True
        end(transport, ApiError(503, why, code="too_many_connections", retry_after_s=RETRY_AFTER_S))
        return False

    def leave(self, transport: asyncio.Transport) -> None:
        """Forget a connection that was let in."""
        address = address_of(transport)
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def end_large_head(self, transport: asyncio.Transport) -> None:
        """End a connection on which a request's head is larger than it may be."""
        self.refused("head_bytes")
        why = f"the request's line and headers have more than {self.settings.head_bytes_max} bytes"
        end(transport, ApiError(431, why, code="headers_too_large"))

    def end_late_head(self, transport: asyncio.Transport) -> None:
        """End a connection on which a request's head has begun, and not ended in time."""
        self.refused("head_wait")
        why = f"the request's head has not come within {self.settings.head_s:g} s"
        end(transport, ApiError(408, why, code="head_timeout"))


def address_of(transport: asyncio.Transport) -> str:
    """Return a client's address, without his port."""
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if peer else ""


def end(transport: asyncio.Transport, error: ApiError) -> None:
    """Say an error to who has no request yet, and close."""
    body = error.encoded()
    reason = {408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}[
        error.status
    ]
    headers = "".join(f"{name}: {value}\r\n" for name, value in error.headers.items())
    head = (
        f"HTTP/1.1 {error.status} {reason}\r\nContent-Type: application/json; charset=utf-8\r\n{headers}"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    transport.write(head.encode() + body)
    transport.close()
