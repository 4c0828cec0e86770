"""The database of a fleet, embedded or external, and the URL that each process gets.

    owner    migrations and rebuilds; no long-running process has it
    writer   the projector
    reader   controllers and frontends; `holdfast database reader` prints it

An external database has one account for everything: the one in its URL.
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
from controller.processes.servers.supervised_server import KeptServer
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
        """The log of the embedded server; None if there is none."""
        return self._server.log

    async def begin(self) -> None:
        """Start the embedded server, unless the database is external. Raise ServerFailed."""
        if self.embedded:
            server = await self._server.begin()
            assert self._accounts is not None
            self.urls = self._accounts.urls(server.url)

    async def _start(self, port: int) -> EmbeddedServer:
        if self._accounts is None:
            self._accounts = DatabaseAccounts.kept(self._directory.accounts)
        return await start_postgres(self._directory.postgres, port=port, accounts=self._accounts)

    def known(self) -> dict[str, str]:
        """Return the database URLs for the fleet's other commands: the reader's, and the owner's for a rebuild."""
        return {"database_url": self.urls.reader, "database_owner_url": self.urls.owner}

    def environment(self, role: str) -> dict[str, str]:
        """Return the environment of a role's process. An empty value keeps it from inheriting ours."""
        url_of = {
            "projector": self.urls.writer,
            **dict.fromkeys(("controller", "frontend", "planner"), self.urls.reader),
        }
        return {VARIABLE: url_of.get(role, "")}

    async def migrate(self) -> tuple[int, str] | None:
        """Migrate the schema in a child process, to keep its imports out of this one. Raise HoldfastError.

        Return the last event that the database has folded, as a stream sequence and ce-id; None if there is none."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "controller.adapters.postgres.migrate"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={
                **os.environ,
                VARIABLE: self.urls.owner,
            },  # not an argument, which `ps` would show to all users
            preexec_fn=die_with(os.getpid()),
        )
        try:
            output, errors = await process.communicate()  # the child has its own deadline
        finally:
            if process.returncode is None:  # cancelled: no caller waits for it
                process.kill()
        if process.returncode:
            raise HoldfastError(
                errors.decode(errors="replace").strip().splitlines()[-1].removeprefix("holdfast: ")
            )
        place = json.loads(output.decode().strip().splitlines()[-1])
        return (place[0], place[1]) if place else None

    async def put_aside(self, name: str) -> None:
        """Rename the schema, so that its rows stay readable, and create a new one. Raise HoldfastError."""
        from controller.adapters.postgres.migrate import rename

        await rename(self.urls.owner, name)
        await self.migrate()

    def check(self) -> None:
        """Raise the error that ended the supervision of the server, if any."""
        self._server.check()

    async def stop(self) -> None:
        """Stop the embedded server gracefully."""
        await self._server.stop()
