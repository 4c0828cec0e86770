"""Which frontends are connected to this worker?"""

import asyncio

import structlog

from events.fleet_key import FleetKey
from events.wire import ToFrontend
from workers.connection import FrontendConnection

CONNECTIONS_MAX = 512

log = structlog.get_logger(__name__)


class FrontendConnections:
    """The open connections of one worker."""

    def __init__(self, worker: str, key: FleetKey | None = None) -> None:
        """None yet. `key`: the fleet's, which they must know."""
        self.key = key
        self.open: set[FrontendConnection] = set()
        self.none_open = asyncio.Event()  # a flag
        self.none_open.set()
        self._worker = worker

    @property
    def any_greeted(self) -> bool:
        """Whether anybody is connected who could still send a request."""
        return any(connection.frontend for connection in self.open)

    def add(self, connection: FrontendConnection) -> None:
        """Take a connection in, or break it if there are too many."""
        self.open.add(connection)
        self.none_open.clear()
        if len(self.open) > CONNECTIONS_MAX:
            log.warning("connection_refused", worker=self._worker, open=CONNECTIONS_MAX)
            connection.abort()

    def remove(self, connection: FrontendConnection) -> None:
        """Forget a connection that is lost."""
        self.open.discard(connection)
        if not self.open:
            self.none_open.set()

    def tell(self, frame: ToFrontend) -> None:
        """Send a frame to every frontend that has said hello."""
        for connection in self.open:
            if connection.frontend:
                connection.send(frame)

    def flush(self) -> None:
        """Send each frontend its part of the present step."""
        for connection in self.open:
            if connection.batch:
                connection.flush()

    def close(self) -> None:
        """Send what is gathered and buffered, then close."""
        for connection in list(self.open):
            connection.close()

    def abort(self) -> None:
        """Break all of them at once: nothing that is buffered leaves."""
        for connection in list(self.open):
            connection.abort()

    def abort_tainted(self) -> None:
        """Break those of which a blackhole has swallowed something: a stream with a hole in it must not go on."""
        for connection in list(self.open):
            if connection.tainted:
                connection.abort()
