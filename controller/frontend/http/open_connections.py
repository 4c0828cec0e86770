"""Limits on the connections of one port, in all and of one address.

A connection is counted until it is lost, also when the fast path hands it over to aiohttp. One that is refused gets an HTTP
error at once.
"""

import asyncio
from collections import Counter

from controller.frontend.errors import ApiError
from controller.frontend.http.answers import refusal, written
from controller.frontend.metrics import BoundMetrics
from controller.frontend.settings import ConnectionSettings

RETRY_AFTER_S = 1


class OpenConnections:
    """The connections of one port, by their clients' addresses."""

    def __init__(self, settings: ConnectionSettings, bounds: BoundMetrics) -> None:
        """`bounds` count each connection that is refused or ended."""
        self.settings = settings
        self._bounds = bounds
        self._by_address: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._by_address.total()

    def enter(self, transport: asyncio.Transport) -> bool:
        """Count a connection and return True, or answer with the reason why it is refused and close it."""
        address, settings = address_of(transport), self.settings
        if settings.per_address_max and self._by_address[address] >= settings.per_address_max:
            self._bounds.count("connections_of_address")
            why = f"there are {settings.per_address_max} connections of this address already"
        elif settings.total_max and len(self) >= settings.total_max:
            self._bounds.count("connections")
            why = f"there are {settings.total_max} connections already"
        else:
            self._by_address[address] += 1
            return True
        end(transport, ApiError(503, why, code="too_many_connections", retry_after_s=RETRY_AFTER_S))
        return False

    def leave(self, transport: asyncio.Transport) -> None:
        """Forget a connection that was counted."""
        address = address_of(transport)
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def end_large_head(self, transport: asyncio.Transport) -> None:
        """End a connection on which a request's head is larger than it may be."""
        self._bounds.count("head_bytes")
        why = f"the request's line and headers have more than {self.settings.head_bytes_max} bytes"
        end(transport, ApiError(431, why, code="headers_too_large"))

    def end_late_head(self, transport: asyncio.Transport) -> None:
        """End a connection on which a request's head has begun, and not ended in time."""
        self._bounds.count("head_wait")
        why = f"the request's head has not come within {self.settings.head_s:g} s"
        end(transport, ApiError(408, why, code="head_timeout"))


def address_of(transport: asyncio.Transport) -> str:
    """Return a client's address without its port."""
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if peer else ""


def end(transport: asyncio.Transport, error: ApiError) -> None:
    """Answer a connection that has no request yet with an error, and close it."""
    response = refusal(error, {"Connection": "close"})
    transport.write(written(response))
    transport.close()
