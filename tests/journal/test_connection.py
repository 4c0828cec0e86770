"""A connection to the broker, and its end."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from nats_world import Broker

from events.connection import Connection

pytestmark = pytest.mark.servers
Eventually = Callable[..., Awaitable[None]]


class Swallowing:
    """A task on which a cancellation has no effect: what `asyncio.wait_for` of Python 3.11 makes of one now and then."""

    def __init__(self, task: "asyncio.Task[None]") -> None:
        self._task = task

    def done(self) -> bool:
        return self._task.done()

    def cancel(self) -> bool:
        return True


async def test_a_closed_connection_reconnects_no_more_even_if_its_cancellation_is_swallowed(
    broker: Broker, eventually: Eventually
) -> None:
    connection = await Connection.open(broker.url, "test")
    await broker.server.kill()
    client = connection.client
    await eventually(lambda: client.is_reconnecting and client._reconnection_task is not None)
    reconnecting = client._reconnection_task
    client._reconnection_task = Swallowing(reconnecting)
    await connection.close()
    await eventually(reconnecting.done)
