"""The broker or the database of a fleet, started again on its port whenever it ends, for as long as that takes.

A fleet serves without them, so one that cannot come back (a full disk, a stolen port) is said and tried again; it
never ends the fleet, and never keeps anybody from looking after the rest.
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.adapters.embedded.servers import EmbeddedServer
from controller.processes.console import warn
from events.errors import HoldfastError

Start = Callable[[int], Coroutine[Any, Any, EmbeddedServer]]
"""Starts the server on a port; 0: any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepingPolicy:
    """How often a server is looked at, and how soon it is started again. Seconds."""

    look_s: float = 0.05
    looks_per_checkup: int = 40  # every so many looks, one that runs is asked whether it is stuck
    wait_min_s: float = 0.2  # between two attempts to start it; twice as long after each that fails
    wait_max_s: float = 10.0


class KeptServer:
    """One embedded server, over all of its lives."""

    def __init__(
        self,
        start: Start,
        announce: Callable[[EmbeddedServer], None],
        stuck: Callable[[EmbeddedServer], bool] = lambda server: False,
        policy: KeepingPolicy = KeepingPolicy(),
    ) -> None:
        self._policy = policy
        self._start = start
        self._stuck = stuck  # it runs, and only a new start helps
        self._announce = announce  # called at the beginning of each life
        self._server: EmbeddedServer | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def log(self) -> Path | None:
        """The log that it writes; None before it was started."""
        return self._server.log if self._server is not None else None

    async def begin(self) -> EmbeddedServer:
        """Start it for the first time, and look after it from now on. Raise ServerFailed."""
        server = self._server = await self._start(0)
        self._announce(server)
        self._keeping = asyncio.create_task(self._keep(server), name=f"keep-{server.role}")
        return server

    def check(self) -> None:
        """Raise what has ended the looking after, if anything has."""
        if self._keeping is not None and self._keeping.done():
            self._keeping.result()

    async def _keep(self, server: EmbeddedServer) -> None:
        while True:
            await self._end_of(server)
            server = self._server = await self._again(server)
            self._announce(server)

    async def _end_of(self, server: EmbeddedServer) -> None:
        """Wait until it has ended, or end it because only that helps."""
        for look in itertools.count(1):
            await asyncio.sleep(self._policy.look_s)
            if not server.running:
                return warn(f"{server.role} ended; starting it again")
            if look % self._policy.looks_per_checkup == 0 and self._stuck(server):
                warn(f"{server.role} is stuck; starting it again")
                await server.stop()
                return None

    async def _again(self, server: EmbeddedServer) -> EmbeddedServer:
        """Start it on its old port, which the kernel may take a moment to give back."""
        wait_s, failures = self._policy.wait_min_s, 0
        while True:
            try:
                return await self._start(server.port)
            except (HoldfastError, OSError) as error:
                failures += 1
                if failures > 1:  # the first may only be the port
                    warn(f"{server.role} does not start: {error}")
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, self._policy.wait_max_s)

    async def stop(self) -> None:
        """Stop it in order."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})
        if self._server is not None:
            await self._server.stop()
