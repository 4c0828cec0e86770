"""The clocks of the controller: the system clock, and a virtual clock that tests advance."""

import asyncio
import heapq
import itertools
import time
from datetime import UTC, datetime, timedelta


class SystemClock:
    """The system clock. Implements `controller.ports.Clock`."""

    def now(self) -> datetime:
        """Return the current time as an aware datetime in UTC."""
        return datetime.now(UTC)

    monotonic = staticmethod(
        time.monotonic
    )  # without a wrapper, because each request calls this a dozen times

    async def sleep(self, seconds: float) -> None:
        """Sleep for `seconds` of real time."""
        await asyncio.sleep(seconds)


class VirtualClock:
    """A clock that tests advance by hand. Sleeping tasks wake in the order of their wake-up times."""

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._start = start
        self._elapsed = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._ties = itertools.count()

    def now(self) -> datetime:
        """Return the virtual time as an aware datetime in UTC."""
        return self._start + timedelta(seconds=self._elapsed)

    def monotonic(self) -> float:
        """Return the virtual seconds since the start."""
        return self._elapsed

    async def sleep(self, seconds: float) -> None:
        """Sleep until the clock has been advanced by `seconds`."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._elapsed + seconds, next(self._ties), future))
        await future

    async def advance(self, seconds: float) -> None:
        """Advance the clock by `seconds`. Each sleeping task wakes at its own time and runs before the clock goes on."""
        end = self._elapsed + seconds
        while self._sleepers and self._sleepers[0][0] <= end:
            at, _, future = heapq.heappop(self._sleepers)
            self._elapsed = max(self._elapsed, at)
            if not future.done():
                future.set_result(None)
                await _settle()
        self._elapsed = end
        await _settle()


async def _settle() -> None:
    """Let all ready tasks run. Ten passes of the event loop suffice for the longest chain of awaits in the tests."""
    for _ in range(10):
        await asyncio.sleep(0)
