"""How frontends come in to a worker's server: on its port, or through a real broker."""

import itertools
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from plain_frontend import PlainFrontend

from controller.adapters.embedded import Server as Broker
from events import subjects
from events.channels import Channels
from events.wire import Hello
from workers.server import Server

DOORS = ("tcp", "nats")
_numbers = itertools.count()


@dataclass(frozen=True)
class Doors:
    """Opens servers, and enters them. Both sides of a broker have a connection of their own."""

    frontends: Channels | None = None
    workers: Channels | None = None
    subjects: dict[Server, str] = field(default_factory=dict)

    async def open(self, server: Server) -> None:
        """Let frontends in."""
        if self.workers is None:
            await server.start("127.0.0.1", 0)
            return
        subject = self.subjects[server] = subjects.plane("w0", f"{server.instance}-{next(_numbers)}")
        await server.start_behind(self.workers, subject)

    async def enter(
        self, server: Server, hello: Hello | None = None, *, narrow: bool = False
    ) -> PlainFrontend:
        """Come in as a frontend; on a port, `narrow` lets the kernel keep next to nothing for it."""
        if self.frontends is None:
            return await PlainFrontend.connect(server.address[1], hello, narrow=narrow)
        return await PlainFrontend.through(self.frontends, self.subjects[server], hello)


def narrow(server: Server) -> None:
    """Let the kernel keep next to nothing on the worker's side, so that slow readers are felt."""
    for connection in server._connections:
        assert connection._transport is not None
        sock = connection._transport.get_extra_info("socket")
        if sock is not None:  # behind a broker the window is the bound
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)


@asynccontextmanager
async def through(broker: Broker) -> AsyncIterator[Doors]:
    """Come in through this broker."""
    frontends = await Channels.open(broker.url, "frontends")
    workers = await Channels.open(broker.url, "workers")
    try:
        yield Doors(frontends, workers)
    finally:
        await frontends.close()
        await workers.close()
