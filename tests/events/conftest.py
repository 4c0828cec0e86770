"""A broker for one test, which the test may kill."""

from collections.abc import AsyncIterator

import pytest
from nats_world import Broker

from controller.adapters.embedded.server import EmbeddedServer


@pytest.fixture
async def broker(own_nats: EmbeddedServer) -> AsyncIterator[Broker]:
    """A nats-server that can be killed and restarted on the same port and directory."""
    made = Broker(own_nats)
    yield made
    await made.server.kill()
