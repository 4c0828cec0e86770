"""The system clock of the controller's processes."""

import asyncio
import time
from datetime import UTC, datetime


class SystemClock:
    """The system clock. Implements `controller.ports.Clock`."""

    def now(self) -> datetime:
        """Return the current time as an aware datetime in UTC."""
        return datetime.now(UTC)

    # without a wrapper, because each request calls this a dozen times
    monotonic = staticmethod(time.monotonic)

    async def sleep(self, seconds: float) -> None:
        """Sleep for `seconds` of real time."""
        await asyncio.sleep(seconds)
