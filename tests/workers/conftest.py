"""Fixtures of the worker tests, which run on uvloop or on the loop that their file names."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
from closing_loop import ClosingLoop
from frontend_routes import ROUTES, FrontendRoute, through
from worker_life import begin as begin
from worker_process import spawn as spawn


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every asynchronous test here on uvloop, except in files that name another loop."""
    return {"uvloop": getattr(item.module, "LOOP", ClosingLoop)}  # type: ignore[attr-defined]


@pytest.fixture(params=ROUTES)
async def route(request: pytest.FixtureRequest) -> AsyncIterator[FrontendRoute]:
    """How frontends connect: to a port, or through a real broker."""
    if request.param == "tcp":
        yield FrontendRoute()
        return
    async with through(request.getfixturevalue("nats_server")) as made:
        yield made
