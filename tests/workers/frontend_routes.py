"""How test frontends connect to a worker's server: to its port, or through a real broker."""

import itertools
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from plain_frontend import PlainFrontend

from controller.adapters.embedded.server import EmbeddedServer as Broker
from events import subjects
from events.nats.channels import Channels
from events.wire import Hello
from workers.server import WorkerServer

ROUTES = ("tcp", "nats")
_numbers = itertools.count()


@dataclass(frozen=True)
class FrontendRoute:
    """Opens servers to frontends, and connects frontends to them. Either side of a broker has its own connection."""

    frontends: Channels | None = None
    workers: Channels | None = None
    subjects: dict[WorkerServer, str] = field(default_factory=dict)

    async def open(self, server: WorkerServer) -> None:
        """Make a server accept frontends."""
        if self.workers is None:
            await server.start("127.0.0.1", 0)
            return
        subject = self.subjects[server] = subjects.plane("w0", f"{server.instance}-{next(_numbers)}")
        await server.start_behind(self.workers, subject)

    async def connect(
        self, server: WorkerServer, hello: Hello | None = None, *, narrow: bool = False
    ) -> PlainFrontend:
        """Connect as a frontend. On a port, `narrow` makes the kernel buffer next to nothing."""
        if self.frontends is None:
            return await PlainFrontend.connect(server.address[1], hello, narrow=narrow)
        return await PlainFrontend.through(self.frontends, self.subjects[server], hello)


def narrow(server: WorkerServer) -> None:
    """Make the kernel buffer next to nothing on the worker's side, so that slow readers have an effect."""
    for connection in server.connections.open:
        assert connection.transport is not None
        sock = connection.transport.get_extra_info("socket")
        if sock is not None:  # through a broker, the window is the limit
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)


@asynccontextmanager
async def through(broker: Broker) -> AsyncIterator[FrontendRoute]:
    """Connect both sides through this broker."""
    frontends = await Channels.open(broker.url, "frontends")
    workers = await Channels.open(broker.url, "workers")
    try:
        yield FrontendRoute(frontends, workers)
    finally:
        await frontends.close()
        await workers.close()
