"""The fixture of a scale subresource."""

from collections.abc import AsyncIterator

import pytest
from scale_world import ScaleServer, serving


@pytest.fixture
async def subresource() -> AsyncIterator[ScaleServer]:
    """Serve a deployment of two replicas."""
    async with serving() as played:
        yield played
