"""The frontend's tests run on the loop that the frontend runs on, or on the one that their file names."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
from closing_loop import ClosingLoop
from frontend_kit import both_roads as both_roads
from roads import road as road


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every asynchronous test here on uvloop, but for files that name another loop."""
    return {"uvloop": getattr(item.module, "LOOP", ClosingLoop)}  # type: ignore[attr-defined]
