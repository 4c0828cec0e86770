"""Limits how long one event-loop iteration reads: timers, due requests and signals wait for its end.

    read ── TURN_S over ──▶ cut: all reading is paused ── next iteration ──▶ read

Paused data waits in the kernel, and in the server if the kernel's buffers are full. Its time is that of the late read.
`behind_s` reports how late that may be, like the lag of an iteration that reads everything.
"""

import asyncio
from collections.abc import Collection

from controller.trace.replay.connection import ClientConnection, now
from controller.trace.replay.response import Now

TURN_S = 0.05  # maximum time of reading in one iteration


class LoopTurn:
    """The current iteration of the event loop, over all connections of an endpoint."""

    def __init__(
        self, connections: Collection[ClientConnection], now: Now = now, turn_s: float = TURN_S
    ) -> None:
        self._connections = connections
        self._now = now
        self._turn_s = turn_s
        self._began = 0.0  # 0: nothing was read in this iteration
        self._cut = False
        self._behind_since = 0.0  # 0: everything that had arrived was read in the last iteration

    def read(self) -> None:
        """Record that a connection has read its arrived data; pause all reading after the time limit."""
        at = self._now()
        if not self._began:
            self._begin(at)
        elif not self._cut and at - self._began > self._turn_s:
            self._cut = True
            self._behind_since = self._behind_since or self._began
            for connection in self._connections:
                connection.pause()

    def behind_s(self) -> float:
        """Return for how many seconds arrived data may have waited."""
        return self._now() - self._behind_since if self._behind_since else 0.0

    def _begin(self, at: float) -> None:
        self._began = at
        asyncio.get_running_loop().call_soon(self._end_turn)

    def _end_turn(self) -> None:
        if not self._cut:
            self._began = self._behind_since = 0.0
            return
        self._cut = False
        self._begin(self._now())  # even if no more data arrives: then none is waiting
        for connection in tuple(self._connections):
            connection.resume()
