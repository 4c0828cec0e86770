"""The simulation kernel: schedules calls in virtual time, and provides random numbers from the seed.

Time is an integer of microseconds since the simulation began. Calls for the same instant run in the order in which they were
scheduled. Each component draws from a random generator of its own, which is identified by a name. An additional draw by one
component therefore does not change the numbers that other components draw. `Random(text)` hashes the text with SHA-512, so
`PYTHONHASHSEED` has no effect.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from heapq import heappop, heappush
from random import Random

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
MS = 1_000
SECOND = 1_000_000
MINUTE = 60 * SECOND

Act = Callable[..., object]


class Kernel:
    """A heap of scheduled calls. `after` schedules a call, and `run` executes the calls that are due."""

    __slots__ = ("_heap", "_instant", "_instant_of", "_tie", "now", "seed")

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 0
        self._heap: list[tuple[int, int, Act, tuple[object, ...]]] = []
        self._tie = 0
        self._instant = EPOCH
        self._instant_of = 0

    @property
    def happened(self) -> int:
        """The number of calls that have run."""
        return self._tie - len(self._heap)

    def chance(self, name: str) -> Random:
        """Return a new random generator for `name`. It draws the same numbers whenever the seed is the same."""
        return Random(f"{self.seed}/{name}")

    def after(self, delay: int, act: Act, *args: object) -> None:
        """Schedule the call `act(*args)`, to run `delay` microseconds from now."""
        self._tie = tie = self._tie + 1
        heappush(self._heap, (self.now + delay, tie, act, args))

    def run(self, until: int) -> None:
        """Run all calls that are due by `until`, in microseconds, and then advance the virtual time to `until`."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, act, args = heappop(heap)
            act(*args)
        self.now = until

    def instant(self) -> datetime:
        """Return the current virtual time as a datetime."""
        if self._instant_of != self.now:
            self._instant = EPOCH + timedelta(microseconds=self.now)
            self._instant_of = self.now
        return self._instant


class KernelClock:
    """The virtual time as a clock for production code."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def now(self) -> datetime:
        """Return the virtual time as a datetime."""
        return self._kernel.instant()

    def monotonic(self) -> float:
        """Return virtual seconds since the simulation began."""
        return self._kernel.now / SECOND

    async def sleep(self, seconds: float) -> None:
        """Raise NotImplementedError, because simulated code never waits: the kernel calls each function at its due time."""
        raise NotImplementedError("simulated code never waits")


def micros(duration: timedelta) -> int:
    """Return a duration in microseconds."""
    return duration // timedelta(microseconds=1)


def since_start(instant: datetime) -> int:
    """Return an instant as microseconds since the simulation began."""
    return micros(instant - EPOCH)


def coin(chance: Random) -> bool:
    """Return True or False, each with probability 1/2."""
    return chance.random() < 0.5


def seconds_drawn(chance: Random, low: int, high: int) -> int:
    """Return a random duration in microseconds, between `low` and `high` seconds.

    Short durations are more likely than long ones.
    """
    return int(low + (high - low) * chance.random() ** 2) * SECOND
