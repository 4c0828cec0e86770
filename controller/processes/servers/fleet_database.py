"""The database of a fleet: the embedded one, started and kept alive, or one of the operator's own; and who gets which URL.

    owner    migrations and rebuilds: no process that stays has it
    writer   the projector
    reader   controllers and frontends; `holdfast database reader` prints it

A database of one's own has the one account that its URL names, for everything.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from controller.adapters.embedded.accounts import DatabaseAccounts, DatabaseUrls
from controller.adapters.embedded.servers import EmbeddedServer, start_postgres
from controller.processes.children import die_with
from controller.processes.fleet_dir import FleetDir
from controller.processes.servers.kept_server import KeptServer
from events.errors import HoldfastError

VARIABLE = "HOLDFAST_DATABASE_URL"


class FleetDatabase:
    """One fleet's database."""

    def __init__(self, directory: FleetDir, url: str, present: Callable[[EmbeddedServer], None]) -> None:
        self.embedded = not url
        self.urls = DatabaseUrls.all_as(url)
        self._directory = directory
        self._accounts: DatabaseAccounts | None = None
        self._server = KeptServer(self._start, present)

    @property
    def log(self) -> Path | None:
        """The embedded server's log; None where there is none."""
        return self._server.log

    async def begin(self) -> None:
        """Start the embedded server, if that is the one. Raise ServerFailed."""
        if self.embedded:
            server = await self._server.begin()
            assert self._accounts is not None
            self.urls = self._accounts.urls(server.url)

    async def _start(self, port: int) -> EmbeddedServer:
        if self._accounts is None:
            self._accounts = DatabaseAccounts.kept(self._directory.accounts)
        return await start_postgres(self._directory.postgres, port=port, accounts=self._accounts)

    def known(self) -> dict[str, str]:
        """Return what the fleet's other commands are told: how to read it, and how to make it anew."""
        return {"database_url": self.urls.reader, "database_owner_url": self.urls.owner}

    def environment(self, role: str) -> dict[str, str]:
        """Return what a process of a role is told. What it is not told it does not inherit from us either."""
        told = {
            "projector": self.urls.writer,
            **dict.fromkeys(("controller", "frontend", "planner"), self.urls.reader),
        }
        return {VARIABLE: told.get(role, "")}

    async def migrate(self) -> tuple[int, str] | None:
        """Bring the schema up to date, in a process of its own: its imports are not wanted here. Return how far it has folded
        the journal, as a stream sequence and the ce-id of that event; None: not at all. Raise HoldfastError."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "controller.adapters.postgres.migrate"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, VARIABLE: self.urls.owner},  # `ps` shows arguments to everybody
            preexec_fn=die_with(os.getpid()),
        )
        try:
            said, words = await process.communicate()  # it has its own deadline
        finally:
            if process.returncode is None:  # nobody waits for it any more
                process.kill()
        if process.returncode:
            raise HoldfastError(
                words.decode(errors="replace").strip().splitlines()[-1].removeprefix("holdfast: ")
            )
        place = json.loads(said.decode().strip().splitlines()[-1])
        return (place[0], place[1]) if place else None

    async def put_aside(self, name: str) -> None:
        """Give the schema another name: its rows stay to be read, and a fresh one takes its place. Raise HoldfastError."""
        from controller.adapters.postgres.aside import rename

        await rename(self.urls.owner, name)
        await self.migrate()

    def check(self) -> None:
        """Raise what has ended the looking after, if anything has."""
        self._server.check()

    async def stop(self) -> None:
        """Stop the embedded server in order."""
        await self._server.stop()
