"""Which frontends are connected to this worker?

    connects ── hello ──▶ a frontend         too many, of all or of one address: the stranger that has said nothing for longest
        └── a stranger until then            makes room, or else, once the newcomer has proved itself, the frontend without a
                                             stream that has asked for nothing for longest; if all have streams, the newcomer

So strangers that connect and say nothing keep no frontend out, however many they are. Neither does a worker that was taken over
and holds connections with the fleet's key: those that are not used make room for the next.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass

import structlog

from events.fleet_key import FleetKey
from events.wire import ToFrontend
from workers.connection import FrontendConnection
from workers.counters import WorkerCounters

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FrontendLimits:
    """How many connections one worker takes. A frontend has one, and a controller."""

    total_max: int = 512  # 0: any number
    per_address_max: int = (
        256  # half of them: no host has all. Behind the broker there are no addresses. 0: any number
    )


class FrontendConnections:
    """The open connections of one worker."""

    def __init__(
        self, worker: str, counters: WorkerCounters, limits: FrontendLimits, key: FleetKey | None = None
    ) -> None:
        """None yet. `key`: the fleet's, which they must know."""
        self.key = key
        self.open: set[FrontendConnection] = set()
        self._strangers: dict[FrontendConnection, None] = {}  # who came first is the first
        self._by_address: Counter[str] = Counter()
        self._counters = counters
        self._limits = limits
        self.none_open = asyncio.Event()  # a flag
        self.none_open.set()
        self._worker = worker

    @property
    def any_greeted(self) -> bool:
        """Whether anybody is connected who could still send a request."""
        return any(connection.frontend for connection in self.open)

    def add(self, connection: FrontendConnection) -> None:
        """Take a connection in, and break another stranger's if there are too many."""
        address = connection.address
        self.open.add(connection)
        self._strangers[connection] = None
        self._by_address[address] += 1
        self.none_open.clear()
        if bound := self._exceeded(address):
            strangers = (one for one in self._strangers if bound == "connections" or one.address == address)
            first = next(strangers)
            if first is not connection:
                self._break(first, bound)

    def _exceeded(self, address: str) -> str:
        """Return which bound is exceeded with a connection of this address; empty if none is."""
        limits = self._limits
        if address and 0 < limits.per_address_max < self._by_address[address]:
            return "connections_of_address"
        return "connections" if 0 < limits.total_max < len(self.open) else ""

    def _break(self, connection: FrontendConnection, why: str) -> None:
        self._counters.refused(why)
        log.warning("connection_refused", worker=self._worker, why=why, open=len(self.open))
        self.remove(connection)
        connection.abort()

    def greeted(self, connection: FrontendConnection) -> bool:
        """Take in that a stranger is a frontend; False: it is broken, since all others that the bound counts have streams."""
        self._strangers.pop(connection, None)
        bound = self._exceeded(connection.address)
        if not bound:
            return True
        unused = (
            one
            for one in self.open
            if one.frontend
            and not one.streams
            and (bound == "connections" or one.address == connection.address)
        )
        least = min(unused, key=lambda one: one.used_at if one is not connection else float("inf"))
        self._break(least, f"{bound}_unused" if least is not connection else bound)
        return least is not connection

    def cut_strangers(self, since: float) -> None:
        """Break the connections that were made before `since` and have said no hello."""
        for connection in [one for one in self._strangers if one.opened_at < since]:
            self._counters.refused("hello_wait")
            self.remove(connection)
            connection.abort()

    def remove(self, connection: FrontendConnection) -> None:
        """Forget a connection that is lost, or broken."""
        if connection not in self.open:
            return
        self.open.remove(connection)
        self._strangers.pop(connection, None)
        self._by_address[connection.address] -= 1
        if not self._by_address[connection.address]:
            del self._by_address[connection.address]
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
