"""Limits the connections of one port, in total and per client address.

A connection is counted until it is lost, also after the fast path hands it over to aiohttp. A refused connection gets an HTTP
error at once.
"""

import asyncio
from collections import Counter

from controller.frontend.errors import ApiError
from controller.frontend.http.responses import encoded_response, refusal
from controller.frontend.metrics import BoundMetrics
from controller.frontend.settings import ConnectionSettings

RETRY_AFTER_S = 1


class OpenConnections:
    """Counts the connections of one port, by client address."""

    def __init__(self, settings: ConnectionSettings, bounds: BoundMetrics) -> None:
        """Start without connections. `bounds` counts each connection that is refused or ended."""
        self.settings = settings
        self._bounds = bounds
        self._by_address: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._by_address.total()

    def enter(self, transport: asyncio.Transport) -> bool:
        """Count a connection and return True. At a limit, send an error, close the connection and return False."""
        address, settings = address_of(transport), self.settings
        if settings.per_address_max and self._by_address[address] >= settings.per_address_max:
            bound = "connections_of_address"
            why = f"this address already has {settings.per_address_max} connections"
        elif settings.total_max and len(self) >= settings.total_max:
            bound, why = "connections", f"this frontend already has {settings.total_max} connections"
        else:
            self._by_address[address] += 1
            return True
        error = ApiError(503, why, code="too_many_connections", retry_after_s=RETRY_AFTER_S)
        self.end(transport, bound, error)
        return False

    def leave(self, transport: asyncio.Transport) -> None:
        """Remove a counted connection."""
        address = address_of(transport)
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def end(self, transport: asyncio.Transport, bound: str, error: ApiError) -> None:
        """Send an error to a connection that exceeds a limit and has no request yet, and close it."""
        self._bounds.count(bound)
        transport.write(encoded_response(refusal(error, {"Connection": "close"})))
        transport.close()


def address_of(transport: asyncio.Transport) -> str:
    """Return a client's address without the port."""
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if peer else ""
