"""Watches all connections of a request plane for hangs, twenty times a second.

`hang` judges a single worker. This module excludes our own lag before any worker is judged, reads our sockets first, and
attributes a silence of all workers at once to this process for a while.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from math import inf

import structlog

from controller.adapters.request_plane.connection import WorkerConnection
from controller.adapters.request_plane.hang import HangPolicy, Process

log = structlog.get_logger(__name__)


class HangWatch:
    """Judges the live connections, and ends the streams of those that hang."""

    def __init__(
        self,
        policy: HangPolicy,
        connections: Callable[[], Mapping[str, WorkerConnection]],
        processes: Callable[[], Iterable[Process]],
        changed: Callable[[], None],
    ) -> None:
        """`connections`: the live ones, by worker; `processes`: the workers' processes; `changed` is called after a worker was
        found hung."""
        self._policy = policy
        self._connections = connections
        self._processes = processes
        self._changed = changed
        self._all_silent_since: float | None = None
        self.look_due = inf  # our next look: time beyond it is our own loop's lag
        self.hangs = 0
        self.late_ticks = 0

    async def run(self) -> None:
        """Judge every connection at each tick, after excluding our own lag and reading our sockets."""
        loop, policy = asyncio.get_running_loop(), self._policy
        due = self.look_due = loop.time() + policy.tick_s
        while True:
            await asyncio.sleep(max(0.0, due - loop.time()))
            now = loop.time()
            if now - due > policy.lag_s:
                self.late_ticks += 1
                self._excuse(now - due, now)
            due = self.look_due = now + policy.tick_s
            for process in self._processes():
                process.look_due = due
            suspects = [
                connection for connection in self._connections().values() if connection.detector.suspect(now)
            ]
            if suspects:
                await asyncio.sleep(policy.lag_s / 2)  # whole loop turns: bytes that have arrived are read
                self._judge([connection for connection in suspects if not connection.readable()], loop.time())
            else:
                self._all_silent_since = None

    def _excuse(self, lag_s: float, now: float) -> None:
        """Exclude our own lag from every worker's silence."""
        for process in self._processes():
            process.excuse(lag_s, now)
        for connection in self._connections().values():
            connection.detector.excuse(lag_s, now)

    def _judge(self, suspects: list[WorkerConnection], now: float) -> None:
        policy, connections = self._policy, self._connections()
        guilty = [(connection, why) for connection in suspects if (why := connection.detector.suspect(now))]
        busy = [connection for connection in connections.values() if connection.detector.open_streams]
        if len(guilty) > 1 and len(guilty) == len(busy):
            self._all_silent_since = self._all_silent_since or now
            if now - self._all_silent_since < policy.all_silent_s:
                return  # all at once: more likely a fault of this process
        for connection, why in guilty:
            self.hangs += 1
            worker = next((name for name, one in connections.items() if one is connection), "?")
            log.warning("worker_hung", worker=worker, why=why, streams=connection.detector.open_streams)
            if connection.detector.silent_s(now) > policy.silence_s:
                connection.drop("stalled", why)  # drop all before any stream is routed to another worker
        for connection, why in guilty:
            connection.lose("stalled", why)  # a live loop reports when the engine makes progress again
        self._changed()
