"""Test kit: a broker that enforces permissions, notifiers that can be killed, and a journal writer."""

import asyncio
import base64
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from told_events import heard
from waits import until

from controller.adapters.embedded.nats import start_nats
from controller.adapters.embedded.nats_users import BrokerUsers, configuration
from controller.adapters.embedded.server import EmbeddedServer
from events import permissions
from events.journal.nats import NatsJournal
from events.nats.urls import as_user, with_keys
from events.process.presence import present

KEY = f"whsec_{base64.b64encode(bytes(range(32))).decode()}"
QUICK = {"WAIT_MIN_S": "0.02", "WAIT_MAX_S": "0.1", "TRIES_MAX": "3", "TIMEOUT_S": "20"}
WITHIN_S = 40.0


@dataclass
class NotifierWorld:
    """One fleet as a notifier sees it."""

    folder: Path
    server: EmbeddedServer
    journal: NatsJournal
    url: str  # of the broker, with the folder of all seeds
    process: asyncio.subprocess.Process | None = None

    @property
    def data(self) -> Path:
        return self.folder / "data"

    async def say(self, *numbers: int) -> list[str]:
        """Append facts to the journal. Return their ids."""
        ids = [self.journal.observe(heard(number)) for number in numbers]
        assert await self.journal.flush(20)
        return ids

    async def notify(self, *webhooks: dict[str, Any], **settings: str) -> None:
        """Start a notifier, and wait until it is ready."""
        (secret := self.folder / "secret").write_text(KEY)
        said = [
            {"kinds": ["worker_heard"], "name": "ops", "secret_file": str(secret), **one} for one in webhooks
        ]
        own = {f"HOLDFAST_NOTIFIER__{name}": value for name, value in {**QUICK, **settings}.items()}
        words = ("notifier", "--data", str(self.data), "--nats-url", self.url)
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "controller.cli", *words),
            env={**os.environ, **own, "HOLDFAST_NOTIFIER__WEBHOOKS": json.dumps(said)},
        )
        process = self.process

        def ready() -> str:
            assert process.returncode is None
            return self.admin

        await until(ready, WITHIN_S)

    @property
    def admin(self) -> str:
        """Address of the running notifier's admin port; empty: not yet known."""
        assert self.process is not None
        return next((one.url for one in present(self.data) if one.pid == self.process.pid), "")

    async def end(self, number: int = signal.SIGKILL) -> int:
        """End the notifier. Return its exit status."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        async with asyncio.timeout(WITHIN_S):
            return await self.process.wait()

    async def asked(self, path: str) -> str:
        """Return the notifier's response to a GET of `path`."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.admin}{path}") as answer:
            return await answer.text()

    async def broker_dies_and_comes_back(self) -> None:
        await self.server.kill()
        self.server = await start_nats(self.server.directory, port=self.server.port, users=self._users())

    def _users(self) -> str:
        return configuration(permissions.users([]), self.folder / "seeds")


@asynccontextmanager
async def notifying(folder: Path) -> AsyncIterator[NotifierWorld]:
    """Yield a world without a notifier."""
    seeds = folder / "seeds"
    BrokerUsers(seeds).make([])
    server = await start_nats(folder / "nats", users=configuration(permissions.users([]), seeds))
    url = with_keys(server.url, seeds)
    journal = await NatsJournal.connect(as_user(url, "controller"), "test:webhooks", folder / "spool")
    made = NotifierWorld(folder, server, journal, url)
    try:
        yield made
    finally:
        if made.process is not None:
            await made.end()
        await journal.close()
        await made.server.kill()
