"""The scale subresource of a test's own."""

from collections.abc import AsyncIterator

import pytest
from scale_world import ScaleServer, serving


@pytest.fixture
async def subresource() -> AsyncIterator[ScaleServer]:
    """A deployment of two replicas."""
    async with serving() as played:
        yield played
