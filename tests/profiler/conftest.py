"""Fixtures for the profiler's tests, some of which run in virtual time."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
from timed_server import LawfulServer


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run a file's asynchronous tests on the loop that the file names, if it does."""
    return {"loop": getattr(item.module, "LOOP", asyncio.new_event_loop)}  # type: ignore[attr-defined]


@pytest.fixture
async def server() -> AsyncIterator[LawfulServer]:
    """A server with known times."""
    server = await LawfulServer().start()
    yield server
    await server.stop()
