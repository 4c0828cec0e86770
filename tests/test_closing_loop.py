"""A test that leaves something open is reported, and the next one begins."""

import asyncio

import pytest
from closing_loop import ClosingLoop
from waits import turns


def test_a_server_that_was_left_open_is_closed_and_reported() -> None:
    loop = ClosingLoop()
    server = loop.run_until_complete(loop.create_server(asyncio.Protocol, "127.0.0.1", 0))
    port = server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]  # uvloop's has them, as asyncio's
    with pytest.raises(ResourceWarning, match="TCPServer"):
        loop.close()
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(asyncio.open_connection("127.0.0.1", port))


def test_a_loop_with_nothing_open_closes_without_a_warning() -> None:
    loop = ClosingLoop()
    loop.run_until_complete(turns())
    loop.close()
    assert loop.is_closed()
