"""The profiler's tests of how fast an engine is run in virtual time."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
from lawful import LawfulServer


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run a file's asynchronous tests on the loop that it names, if it does."""
    return {"loop": getattr(item.module, "LOOP", asyncio.new_event_loop)}  # type: ignore[attr-defined]


@pytest.fixture
async def server() -> AsyncIterator[LawfulServer]:
    """A server whose every time is known."""
    server = await LawfulServer().start()
    yield server
    await server.stop()
