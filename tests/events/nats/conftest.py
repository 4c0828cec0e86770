"""The request plane's tests run on the loop that it runs on."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop
from own_brokers import authority, start

__all__ = ["authority", "start"]


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every asynchronous test here on uvloop."""
    return {"uvloop": uvloop.new_event_loop}
