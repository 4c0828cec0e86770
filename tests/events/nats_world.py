"""Helpers of the tests of the journal on NATS: facts, reads, a broker to restart, a proxy to break."""

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nats
from journal_end import last_seq

from controller.adapters.embedded.nats import start_nats
from controller.adapters.embedded.server import EmbeddedServer
from events.decisions import Absorbed
from events.fact import Decision, Observation, Recorded
from events.journal.nats import NatsJournal
from events.journal.stream import stream_config
from events.observations import DrainRequested
from events.subjects import STREAM

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def drain(number: int, worker: str = "w1") -> Observation:
    return DrainRequested(worker=worker, instance="i1", by=f"fact {number}")


def absorbed(number: int) -> Decision:
    return Absorbed(number=number, decided_at=NOW)


async def read_all(journal: NatsJournal, after: int = 0, deadline_s: float = 20.0) -> list[Recorded]:
    """Return everything after a position up to the current end."""
    found: list[Recorded] = []
    async with asyncio.timeout(deadline_s):
        until = await last_seq(journal)
        if until > after:
            async for batch in journal.read(after, until=until):
                found += batch
    return found


async def make_stream(url: str, **change: Any) -> None:
    """Create the stream as another program might have."""
    client = await nats.connect(url)
    try:
        request = json.dumps({**stream_config(1), **change}).encode()
        answer = await client.request(f"$JS.API.STREAM.CREATE.{STREAM}", request, timeout=10)
        assert "error" not in json.loads(answer.data), answer.data
    finally:
        await client.close()


def folded(events: Sequence[Recorded]) -> dict[str, list[Recorded]]:
    """Return each source's facts as a fold accepts them: numbers not above the source's last one are dropped."""
    kept: dict[str, list[Recorded]] = defaultdict(list)
    for event in events:
        if not kept[event.source] or event.source_number > kept[event.source][-1].source_number:
            kept[event.source].append(event)
    return kept


class Broker:
    """A nats-server that can be killed and restarted on the same port and directory."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.server = server
        self.restarts = 0

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def store(self) -> Path:
        return self.server.directory / "store"

    async def restart(self) -> None:
        await self.server.kill()
        await self.start()

    async def start(self) -> None:
        self.server = await start_nats(self.server.directory, port=self.server.port)
        self.restarts += 1


class Wire:
    """A TCP proxy that can break every connection after some bytes from the client, or stop forwarding."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.cut_after: int | None = None
        self.swallow = False
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            back_reader, back_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, back_writer}
        for source, target, counted in ((reader, back_writer, True), (back_reader, writer, False)):
            task = asyncio.create_task(self._pass(source, target, counted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, counted: bool) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            while data := await source.read(65536):
                if self.swallow:
                    continue
                if counted and self.cut_after is not None:
                    data, self.cut_after = data[: self.cut_after], self.cut_after - len(data)
                target.write(data)
                await target.drain()
                if counted and self.cut_after is not None and self.cut_after <= 0:
                    self.cut_after = None
                    self.cut()
        target.close()

    def cut(self) -> None:
        """Break every connection."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
