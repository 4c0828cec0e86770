"""A minimal frontend: sends a hello, sends requests, and records every frame that it receives."""

import asyncio
import itertools
import socket
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

from events import wire
from events.nats.channels import Channels
from events.wire import Beat, Cancel, Chunk, Generate, Hello, Sampling, Step, ToFrontend, Welcome

DEADLINE_S = 20.0
F = TypeVar("F", bound=ToFrontend)


class PlainFrontend(asyncio.Protocol):
    """One connection to a worker."""

    def __init__(self) -> None:
        self.frames: list[ToFrontend] = []
        self.heard_at: list[float] = []
        self._by_kind: defaultdict[type, list[Any]] = defaultdict(
            list
        )  # the same frames by type, because conditions are evaluated often
        self._by_stream: defaultdict[int, list[Chunk]] = defaultdict(list)
        self._ends: dict[int, Chunk] = {}
        self.closed = asyncio.Event()
        self._splitter = wire.Splitter()
        self._streams = itertools.count(1)
        self._changed = asyncio.Event()
        self.transport: Any = None

    @classmethod
    async def connect(cls, port: int, hello: Hello | None = None, *, narrow: bool = False) -> "PlainFrontend":
        """Connect and send a hello. `narrow` makes the kernel buffer next to nothing."""
        loop = asyncio.get_running_loop()
        sock = socket.socket()
        sock.setblocking(False)
        if narrow:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        await loop.sock_connect(sock, ("127.0.0.1", port))
        _, frontend = await loop.create_connection(cls, sock=sock)
        frontend.say(hello or Hello("test"))
        return frontend

    @classmethod
    async def through(cls, channels: Channels, subject: str, hello: Hello | None = None) -> "PlainFrontend":
        """Connect through the broker and send a hello."""
        frontend = await channels.dial(subject, cls)
        assert isinstance(frontend, PlainFrontend)
        frontend.say(hello or Hello("test"))
        return frontend

    def number(self) -> int:
        """Return the number of a new stream."""
        return next(self._streams)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        for body in self._splitter.feed(data):
            self._take(wire.to_frontend.decode(body))
            self.heard_at.append(asyncio.get_running_loop().time())
        self._changed.set()

    def _take(self, frame: ToFrontend) -> None:
        self.frames.append(frame)
        self._by_kind[type(frame)].append(frame)
        for chunk in frame.chunks if isinstance(frame, Step) else ():
            self._by_stream[chunk.stream].append(chunk)
            if chunk.finish or chunk.error:
                self._ends.setdefault(chunk.stream, chunk)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set()
        self._changed.set()

    def say(self, frame: wire.ToWorker) -> None:
        self.transport.write(wire.encode(frame))

    def ask(self, tokens: list[int], *, canary: bool = False, **sampling: Any) -> int:
        stream = self.number()
        wanted = Sampling(**{"max_tokens": 16, "ignore_eos": True, **sampling})
        self.say(Generate(stream, f"r{stream}", tokens, len(tokens), wanted, canary))
        return stream

    def cancel(self, stream: int, why: str = "gone") -> None:
        self.say(Cancel(stream, why))

    async def until(self, condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
        """Wait until a condition on the received frames holds."""
        async with asyncio.timeout(deadline_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def lost(self) -> None:
        """Wait until the connection is closed."""
        async with asyncio.timeout(DEADLINE_S):
            await self.closed.wait()

    async def answer(self, stream: int) -> list[int]:
        """Wait for the end of a stream and return its tokens."""
        await self.until(lambda: self.end(stream) is not None)
        return self.tokens(stream)

    def of(self, kind: type[F]) -> list[F]:
        """Return the frames of a type, in order of arrival."""
        return self._by_kind[kind]

    def chunks(self, stream: int) -> list[Chunk]:
        return self._by_stream[stream]

    def tokens(self, stream: int) -> list[int]:
        return [token for chunk in self.chunks(stream) for token in chunk.tokens]

    def end(self, stream: int) -> Chunk | None:
        return self._ends.get(stream)

    @property
    def steps(self) -> list[Step]:
        return self.of(Step)

    @property
    def beats(self) -> list[Beat]:
        return self.of(Beat)

    @property
    def welcome(self) -> Welcome | None:
        return next(iter(self.of(Welcome)), None)
