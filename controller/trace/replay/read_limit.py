"""Limits how long one turn of the loop reads: timers, due requests and signals wait for its end.

    read ── TURN_S over ──▶ cut: all reading is paused ── the next turn ──▶ read

Paused data waits in the kernel, and in the server if the kernel's buffers are full. It is measured late, when it is read.
`behind_s` reports how late that may be, like the lag of a turn that reads everything.
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
        self._began = 0.0  # 0: nothing was read in it
        self._cut = False
        self._behind_since = 0.0  # 0: everything that had arrived was read in the last turn

    def read(self) -> None:
        """Called when a connection has read what had arrived."""
        at = self._now()
        if not self._began:
            self._begin(at)
        elif not self._cut and at - self._began > self._turn_s:
            self._cut = True
            self._behind_since = self._behind_since or self._began
            for connection in self._connections:
                connection.pause()

    def behind_s(self) -> float:
        """Return for how long arrived data may have waited."""
        return self._now() - self._behind_since if self._behind_since else 0.0

    def _begin(self, at: float) -> None:
        self._began = at
        asyncio.get_running_loop().call_soon(self._end_turn)

    def _end_turn(self) -> None:
        if not self._cut:
            self._began = self._behind_since = 0.0
            return
        self._cut = False
        self._begin(self._now())  # even if no more arrives: then nothing is behind
        for connection in tuple(self._connections):
            connection.resume()
