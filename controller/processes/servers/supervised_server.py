"""Supervises an embedded server (broker, database, Prometheus): restarts it whenever it ends.

The fleet keeps serving without these servers. One that cannot be restarted (full disk, port taken) is reported and retried; it
never ends the fleet, and never blocks the supervision of the rest.
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

from controller.adapters.embedded.servers import EmbeddedServer
from controller.processes.console import warn
from events.errors import HoldfastError

Start = Callable[[int], Coroutine[object, object, EmbeddedServer]]
"""Starts the server on a port; 0: any free port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepingPolicy:
    """Intervals of checks and restarts, in seconds."""

    look_s: float = 0.05
    looks_per_checkup: int = 40  # one check in so many also tests whether a running server is stuck
    wait_min_s: float = 0.2  # delay between two attempts to start it; doubles after each failure
    wait_max_s: float = 10.0


class KeptServer:
    """One embedded server across restarts."""

    def __init__(
        self,
        start: Start,
        announce: Callable[[EmbeddedServer], None],
        stuck: Callable[[EmbeddedServer], bool] = lambda server: False,
        policy: KeepingPolicy = KeepingPolicy(),
    ) -> None:
        self._policy = policy
        self._start = start
        self._stuck = stuck  # returns whether a running server must be restarted
        self._announce = announce  # called after each start
        self._server: EmbeddedServer | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def log(self) -> Path | None:
        """The log of the server; None before its first start."""
        return self._server.log if self._server is not None else None

    async def begin(self) -> EmbeddedServer:
        """Start the server for the first time, and supervise it from now on. Raise ServerFailed."""
        server = self._server = await self._start(0)
        self._announce(server)
        self._keeping = asyncio.create_task(self._keep(server), name=f"keep-{server.role}")
        return server

    def check(self) -> None:
        """Raise the error that ended the supervision, if any."""
        if self._keeping is not None and self._keeping.done():
            self._keeping.result()

    async def _keep(self, server: EmbeddedServer) -> None:
        while True:
            await self._end_of(server)
            server = self._server = await self._again(server)
            self._announce(server)

    async def _end_of(self, server: EmbeddedServer) -> None:
        """Wait until the server has ended, or stop it if it is stuck."""
        for look in itertools.count(1):
            await asyncio.sleep(self._policy.look_s)
            if not server.running:
                return warn(f"{server.role} ended; starting it again")
            if look % self._policy.looks_per_checkup == 0 and self._stuck(server):
                warn(f"{server.role} is stuck; starting it again")
                await server.stop()
                return None

    async def _again(self, server: EmbeddedServer) -> EmbeddedServer:
        """Start the server on its old port, which the kernel may free only after a moment."""
        wait_s, failures = self._policy.wait_min_s, 0
        while True:
            try:
                return await self._start(server.port)
            except (HoldfastError, OSError) as error:
                failures += 1
                if failures > 1:  # the first failure may only be the port
                    warn(f"{server.role} does not start: {error}")
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, self._policy.wait_max_s)

    async def stop(self) -> None:
        """Stop the server gracefully."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})
        if self._server is not None:
            await self._server.stop()
