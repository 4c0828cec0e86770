"""The short way in: one client's connection, as long as each request on it is what nearly every request is.

    a request for tokens, HTTP/1.1, with nothing unusual in its head ──▶ Api.answer ──▶ a stream, or one response
    anything else, or bytes before their turn ──▶ aiohttp has the connection from then on

aiohttp wakes two tasks for a request, and makes a reader, a writer, a response and two multidicts: an eighth of what an
answer of 64 tokens took. Nothing of that is wanted where the whole request lies there and its head is known.

What a reader would get wrong: nothing is understood here that aiohttp would understand otherwise. Its own parser reads each
new head; whatever is not plain is handed over unread, from its first byte, and so is all that comes after it.
"""

import asyncio
import socket
from collections.abc import Callable
from email.utils import formatdate
from typing import cast

from aiohttp import web
from aiohttp.http import SERVER_SOFTWARE

from controller.frontend.api import Api
from controller.frontend.heads import Head

# Of a request that goes the short way, and of what is sent ahead of its turn. Past it reading pauses, and a client who goes
# away meanwhile is noticed when his turn has come.
BYTES_MAX = 2**18
HEAD_BYTES_MAX = 2**13  # of its head, which is remembered
PATIENCE_S = 1.0  # how long a body may lag behind its head; then aiohttp waits for it, with the deadline
_END = b"\r\n\r\n"


class Connection(asyncio.Protocol):
    """One client's connection to the port that all frontends of a host share."""

    __slots__ = (
        "_answering", "_api", "_came", "_ends", "_gathered", "_heads", "_idle_max_s", "_lagging", "_long_way", "_loop",
        "_open", "_rests", "_transport", "_writing_paused",
    )  # fmt: skip

    def __init__(
        self,
        api: Api,
        heads: Callable[[bytes], Head | None],
        long_way: Callable[[], asyncio.Protocol],
        open: "set[Connection]",
        idle_max_s: float,
    ) -> None:
        """Begin with a client. `long_way` makes what takes over what is not plain; `open` holds all connections like this."""
        self._api = api
        self._heads = heads
        self._long_way = long_way
        self._open = open
        self._idle_max_s = idle_max_s
        self._loop = asyncio.get_running_loop()
        self._gathered = bytearray()  # what has come and is not understood yet
        self._answering: asyncio.Task[None] | None = None
        self._lagging: asyncio.TimerHandle | None = None  # waits for the rest of a body
        self._came = 0.0  # when the last answer had ended, or the connection was made
        self._ends = False  # with the answer under way
        self._writing_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._came = self._loop.time()
        self._rests = self._loop.call_later(self._idle_max_s, self._look)
        self._open.add(self)

    def data_received(self, data: bytes) -> None:
        """Take a request, or a part of one."""
        if self._answering is not None or self._gathered:
            self._gather(data)
            return
        if (
            self._writing_paused
        ):  # the client does not read what he was told before: aiohttp waits until he does
            self._go_long(data)
            return
        head = self._heads(data[: data.find(_END, 0, HEAD_BYTES_MAX) + len(_END)])
        if head is None or head.whole > BYTES_MAX or len(data) > head.whole:
            self._go_long(data)
        elif len(data) == head.whole:
            self._begin(head, data)
        else:
            self._gathered += data
            self._lagging = self._loop.call_later(PATIENCE_S, self._go_long)

    def _gather(self, data: bytes) -> None:
        """Keep what comes behind a head, or before its turn."""
        gathered = self._gathered
        gathered += data
        if self._answering is not None:
            if len(gathered) > BYTES_MAX:
                self._transport.pause_reading()
            return
        end = gathered.find(_END) + len(_END)
        head = self._heads(bytes(gathered[:end]))
        assert head is not None
        if len(gathered) > head.whole:
            self._go_long()
        elif len(gathered) == head.whole:
            self._calm()
            self._gathered = bytearray()
            self._begin(head, bytes(gathered))

    def _begin(self, head: Head, request: bytes) -> None:
        self._answering = self._loop.create_task(self._answer(head, request[head.end :]))

    async def _answer(self, head: Head, body: bytes) -> None:
        """Answer a request. A client that goes away cancels this."""
        transport = self._transport
        try:
            response = await self._api.answer(head, body, transport)
            if response is not None and not transport.is_closing():
                transport.write(written(response))
        except BaseException:
            transport.close()  # nobody can say how far the answer had come
            raise
        finally:
            self._answering = None
        if transport.is_closing():
            return
        self._came = self._loop.time()
        if self._ends:
            transport.close()
        elif self._gathered:
            self._go_long()

    def _go_long(self, data: bytes = b"") -> None:
        """Hand the connection over, with all that has come and is not answered."""
        self._leave()
        transport, other = self._transport, self._long_way()
        transport.set_protocol(other)
        other.connection_made(transport)
        if self._writing_paused:
            other.pause_writing()
        transport.resume_reading()
        other.data_received(bytes(self._gathered) + data)

    def _look(self) -> None:
        """Close the connection if nothing has been asked for too long."""
        busy = self._answering is not None or self._gathered
        idle = 0.0 if busy else self._loop.time() - self._came
        if idle >= self._idle_max_s:
            self._transport.close()
        else:
            self._rests = self._loop.call_later(self._idle_max_s - idle, self._look)

    def end(self) -> "asyncio.Task[None] | None":
        """Close the connection, or let what is answered be its last; return that."""
        self._ends = True
        if self._answering is None:
            self._transport.close()
        return self._answering

    def pause_writing(self) -> None:
        """The client reads slowly: its stream looks after that itself."""
        self._writing_paused = True

    def resume_writing(self) -> None:
        """The client has read."""
        self._writing_paused = False

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._leave()
        if self._answering is not None:
            self._answering.cancel()

    def _leave(self) -> None:
        self._open.discard(self)
        self._rests.cancel()
        self._calm()

    def _calm(self) -> None:
        if self._lagging is not None:
            self._lagging.cancel()
            self._lagging = None


def written(response: web.Response) -> bytes:
    """Return a response as aiohttp writes it on a connection that stays."""
    body = response.body
    assert isinstance(body, bytes)
    headers = "".join(f"{name}: {value}\r\n" for name, value in response.headers.items())
    return (
        f"HTTP/1.1 {response.status} {response.reason}\r\n{headers}Content-Length: {len(body)}\r\n"
        f"Date: {formatdate(usegmt=True)}\r\nServer: {SERVER_SOFTWARE}\r\n\r\n"
    ).encode() + body
