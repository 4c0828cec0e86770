"""Measures a Holdfast worker directly, over the connection that frontends use (the request plane)."""

import asyncio
import itertools
from urllib.parse import urlsplit

from controller.profiler.target import CannotMeasure, ProfiledStream, TargetRefused
from controller.trace.replay.endpoint import Now, now
from events import wire
from events.errors import os_reason
from events.wire import Chunk, Generate, Hello, Sampling, Step, Welcome

CONNECT_S_MAX = 5.0
READ_BYTES = 256 * 1024


class WorkerTarget:
    """Connects to the worker that is measured. Times are read from the clock `now`."""

    def __init__(self, url: str, now: Now = now) -> None:
        self.name = ""
        self.context_tokens: int | None = None
        self._url = url
        self._now = now
        self._streams: dict[int, ProfiledStream] = {}
        self._numbers = itertools.count(1)
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._welcome: asyncio.Future[Welcome] | None = None
        self._broken: CannotMeasure | None = None

    async def open(self) -> None:
        """Connect to the worker as a frontend does. Raise CannotMeasure if no worker answers at the URL."""
        where = urlsplit(self._url)
        self._welcome = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                reader, self._writer = await asyncio.open_connection(where.hostname, where.port)
                self._reading = asyncio.ensure_future(self._read(reader))
                self._writer.write(wire.encode(Hello("profile")))
                self.name = (await self._welcome).model
        except (OSError, TimeoutError) as error:
            raise CannotMeasure(f"{self._url} cannot be reached: {os_reason(error)}") from None

    async def _read(self, reader: asyncio.StreamReader) -> None:
        splitter, error = wire.Splitter(), CannotMeasure(f"{self._url} closed the connection")
        try:
            while data := await reader.read(READ_BYTES):
                at = self._now()
                for body in splitter.feed(data):
                    self._take(wire.to_frontend.decode(body), at)
        except (OSError, ValueError, wire.BadFrame) as broken:
            error = CannotMeasure(f"{self._url} is not a worker, or closed the connection: {broken}")
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_exception(error)
        self._broken = error
        for stream in self._streams.values():
            stream.end(error)

    def _take(self, frame: wire.ToFrontend, at: float) -> None:
        match frame:
            case Welcome() if self._welcome is not None and not self._welcome.done():
                self._welcome.set_result(frame)
            case Step(chunks=chunks):
                for chunk in chunks:
                    self._receive(chunk, at)

    def _receive(self, chunk: Chunk, at: float) -> None:
        stream = self._streams.get(chunk.stream)
        if stream is None:
            return
        count = len(chunk.tokens) or (1 if chunk.text else 0)
        if count:
            stream.record(at, count)
        if chunk.error or chunk.finish:
            del self._streams[chunk.stream]
            stream.end(self._refusal(chunk.error) if chunk.error else None)

    def _refusal(self, error: str) -> CannotMeasure:
        kind = TargetRefused if error.startswith(("invalid_request", "overloaded")) else CannotMeasure
        return kind(f"the worker answers: {error}")

    def ask(self, prompt: list[int], tokens: int) -> ProfiledStream:
        """Request a completion of `tokens` tokens for this prompt, and return its stream."""
        assert self._writer is not None
        number, stream = next(self._numbers), ProfiledStream(self._now(), prompt_tokens=len(prompt))
        if self._broken is not None:
            stream.end(self._broken)
            return stream
        self._streams[number] = stream
        sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        request = Generate(number, f"profile-{number}", prompt, len(prompt), sampling)
        self._writer.write(wire.encode(request))
        return stream

    async def close(self) -> None:
        """Close the connection."""
        if self._writer is not None:
            self._writer.close()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait((self._reading,), timeout=CONNECT_S_MAX)
