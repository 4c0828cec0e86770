"""Worker processes for the tests, and their logs."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from events.journal.nats import NatsJournal
from workers.kv_transfer.receiver import PREFIX
from workers.kv_transfer.receiver import ROOT as SHARED

ROOT = Path(__file__).parents[2]
START_S = 20.0


@dataclass
class Process:
    """A worker process and its log lines."""

    inner: asyncio.subprocess.Process
    data: Path
    lines: list[str] = field(default_factory=list)
    reader: asyncio.Task[None] | None = None

    @property
    def ready(self) -> list[dict[str, Any]]:
        return [line for line in map(_parsed, self.lines) if line.get("event") == "worker_ready"]

    @property
    def events(self) -> list[str]:
        """The event of each log line."""
        return [_parsed(line).get("event", line) for line in self.lines]

    def port(self, number: int = 0) -> int:
        return urlsplit(self.ready[number]["url"]).port or 0

    async def ended(self) -> int:
        async with asyncio.timeout(START_S):
            code = await self.inner.wait()
            assert self.reader is not None
            await self.reader
        return code


def held(instance: str) -> list[str]:
    """Return the files of an instance's shared memory."""
    folder = SHARED / f"{PREFIX}{instance}"
    return sorted(os.listdir(folder)) if folder.exists() else []


def left(process: Process, instance: str) -> list[str]:
    """Return the files and segments left by a worker that has ended."""
    spooled = [path.name for path in process.data.glob("spool/**/*.spool") if path.stat().st_size]
    return [*spooled, *os.listdir(process.data / "run"), *held(instance)]


def _parsed(line: str) -> dict[str, Any]:
    return json.loads(line) if line.startswith("{") else {}


Spawn = Callable[..., Awaitable[Process]]


@pytest.fixture
async def spawn(tmp_path: Path) -> AsyncIterator[Spawn]:
    """`await spawn("--itl-ms", "5", nats_url=…)` starts a worker process."""
    processes: list[Process] = []

    async def start(*flags: str, nats_url: str = "", **environment: str) -> Process:
        if nats_url:  # no worker creates the stream
            await (await NatsJournal.connect(nats_url, "controller:test", wait_s=1.0)).close()
        inner = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "workers", "--data", str(tmp_path), *flags,
            cwd=ROOT, env={**os.environ, "HOLDFAST_NATS_URL": nats_url, **environment},
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        process = Process(inner, tmp_path)

        async def read() -> None:
            assert inner.stderr is not None
            async for line in inner.stderr:
                process.lines.append(line.decode())

        process.reader = asyncio.ensure_future(read())
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.inner.returncode is None:
            process.inner.kill()
        await process.ended()
