"""Processes for the length of a test: any command, or roles of `holdfast` on one data directory."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from events.process.presence import present

HOLDFAST = str(Path(sys.executable).with_name("holdfast"))
Process = asyncio.subprocess.Process
R = TypeVar("R", bound="Roles")


@asynccontextmanager
async def process(*command: str, **options: Any) -> AsyncIterator[Process]:
    """A process that is ended with the block, however the block ends."""
    child = await asyncio.create_subprocess_exec(*command, **options)
    try:
        yield child
    finally:
        await end(child)


async def end(child: Process) -> None:
    """Kill a process that still runs, and wait for it."""
    if child.returncode is None:
        child.kill()
    await child.wait()


class Roles:
    """Processes of roles, and an HTTP client for requests to them."""

    def __init__(self, data: Path, http: aiohttp.ClientSession) -> None:
        self.data, self.http = data, http
        self.log = data / "stderr.log"
        self.running: list[Process] = []

    @classmethod
    @asynccontextmanager
    async def on(cls: type[R], data: Path) -> AsyncIterator[R]:
        """Start with no process; all of them are ended with the block."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as http:
            made = cls(data, http)
            try:
                yield made
            finally:
                for child in made.running:
                    await end(child)

    async def start(self, *words: str, **settings: str) -> Process:
        """Start a role, without this process's settings, but with these in its environment."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")} | settings
        with self.log.open("ab") as log:
            child = await asyncio.create_subprocess_exec(
                HOLDFAST, *words, "--data", str(self.data), env=environment, stderr=log
            )
        self.running.append(child)
        return child

    def admin(self, name: str) -> str:
        """Return the URL of a role's admin port; empty while it is not up."""
        return next((p.url for p in present(self.data) if p.name == name), "")
