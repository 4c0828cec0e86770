"""How long may one turn of the loop read? Timers, requests that are due and signals wait for its end.

    read ── TURN_S over ──▶ cut: nobody is read any more ── the next turn ──▶ read

What is cut waits with the kernel, and with the server if that is full: it is measured as late as it is read, so how late that
may be is said (`behind_s`), as the lag of a turn is that reads it all.
"""

import asyncio
from collections.abc import Collection

from controller.trace.replay.connection import ClientConnection, now
from controller.trace.replay.response import Now

TURN_S = 0.05  # of reading, at most


class LoopTurn:
    """The present turn of the loop, over all connections of an endpoint."""

    def __init__(
        self, connections: Collection[ClientConnection], now: Now = now, turn_s: float = TURN_S
    ) -> None:
        self._connections = connections
        self._now = now
        self._turn_s = turn_s
        self._began = 0.0  # 0: nobody has read in it
        self._cut = False
        self._behind_since = 0.0  # 0: whatever had come was read in the last turn

    def read(self) -> None:
        """A connection has taken in what had come."""
        at = self._now()
        if not self._began:
            self._begin(at)
        elif not self._cut and at - self._began > self._turn_s:
            self._cut = True
            self._behind_since = self._behind_since or self._began
            for connection in self._connections:
                connection.pause()

    def behind_s(self) -> float:
        """Return for how long something may have waited that had come before."""
        return self._now() - self._behind_since if self._behind_since else 0.0

    def _begin(self, at: float) -> None:
        self._began = at
        asyncio.get_running_loop().call_soon(self._over)

    def _over(self) -> None:
        if not self._cut:
            self._began = self._behind_since = 0.0
            return
        self._cut = False
        self._begin(self._now())  # also where nothing more comes: then nobody is behind
        for connection in tuple(self._connections):
            connection.resume()
