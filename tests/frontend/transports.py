"""The roads from a frontend to its workers: directly to their ports, or through a real broker."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from scripted_worker import ScriptedWorker

from controller.adapters.embedded.server import EmbeddedServer
from controller.adapters.request_plane.client import RequestPlaneClient
from controller.adapters.request_plane.nats_dialer import NatsDialer
from controller.adapters.request_plane.worker_links import PlaneLimits
from events.fleet_key import FleetKey
from events.nats.channels import Channels
from events.subjects import PLANE_SCHEME

ROADS = ("tcp", "nats")


@dataclass(frozen=True)
class Road:
    """A road. Frontends and workers each have their own broker connection, like separate processes."""

    name: str
    frontends: Channels | None = None
    workers: Channels | None = None

    def lay(self, worker: ScriptedWorker) -> ScriptedWorker:
        """Make this worker reachable by this road, unless it has its own."""
        if self.workers is not None:
            worker.channels = worker.channels or self.workers
        return worker

    def plane(
        self, name: str, limits: PlaneLimits | None = None, key: FleetKey | None = None
    ) -> RequestPlaneClient:
        """Return a request plane for this road."""
        dialers = {PLANE_SCHEME: NatsDialer(self.frontends)} if self.frontends is not None else {}
        return RequestPlaneClient(name, limits, dialers, key)


@asynccontextmanager
async def through(broker: EmbeddedServer) -> AsyncIterator[Road]:
    """Build the road through a broker."""
    frontends = await Channels.open(broker.url, "frontends")
    workers = await Channels.open(broker.url, "workers")
    try:
        yield Road("nats", frontends, workers)
    finally:
        await frontends.close()
        await workers.close()


@pytest.fixture(params=ROADS)
async def road(request: pytest.FixtureRequest) -> AsyncIterator[Road]:
    """Each of the roads in turn."""
    if request.param == "tcp":
        yield Road("tcp")
        return
    async with through(request.getfixturevalue("nats_server")) as made:
        yield made
