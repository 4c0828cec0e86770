"""Closing a broker connection works whatever happens to the client meanwhile."""

import asyncio

import pytest
from waits import turns

from controller.adapters.embedded.server import EmbeddedServer
from events.nats.connection import BrokerConnection

pytestmark = pytest.mark.servers


async def test_a_client_that_is_cancelled_while_closing_does_not_cancel_the_caller(
    own_nats: EmbeddedServer,
) -> None:
    """nats-py cancels its reconnecting, which may wait for the same transport: the cancellation is not ours."""
    connection = await BrokerConnection.open(own_nats.url, "test")
    close = connection.client.close

    async def cancelled() -> None:
        await close()
        raise asyncio.CancelledError

    connection.client.close = cancelled  # type: ignore[method-assign]
    await connection.close()
    assert not connection.connected


async def test_a_caller_that_is_cancelled_while_closing_is_cancelled(own_nats: EmbeddedServer) -> None:
    connection = await BrokerConnection.open(own_nats.url, "test")
    closing = asyncio.create_task(connection.close())
    await turns()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await connection.close()
