"""Runs the frontend's tests on the frontend's event loop, or on the one that a test file names."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
from closing_loop import ClosingLoop
from frontend_kit import both_roads as both_roads
from transports import road as road


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every asynchronous test here on uvloop, unless its file names another loop."""
    return {"uvloop": getattr(item.module, "LOOP", ClosingLoop)}  # type: ignore[attr-defined]
