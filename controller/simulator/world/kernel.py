"""The simulation kernel: an event heap in virtual time, and random streams fixed by the seed.

Time is an integer of microseconds since the simulation began. Events at the same instant run in the order in which they
were scheduled. Every component draws from its own random stream, which has its name, so that one more draw by one component
does not change any other draw. `Random(text)` hashes its text with SHA-512, which `PYTHONHASHSEED` does not affect.
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
    """The event heap. `after` schedules a call; `run` executes what is due."""

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
        """The number of events that have run."""
        return self._tie - len(self._heap)

    def chance(self, name: str) -> Random:
        """Return the stream of random numbers that belongs to `name`."""
        return Random(f"{self.seed}/{name}")

    def after(self, delay: int, act: Act, *args: object) -> None:
        """Schedule `act(*args)` for `delay` microseconds from now."""
        self._tie = tie = self._tie + 1
        heappush(self._heap, (self.now + delay, tie, act, args))

    def run(self, until: int) -> None:
        """Run everything that is due by `until`."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, act, args = heappop(heap)
            act(*args)
        self.now = until

    def instant(self) -> datetime:
        """Return the current instant as the deciders see it."""
        if self._instant_of != self.now:
            self._instant = EPOCH + timedelta(microseconds=self.now)
            self._instant_of = self.now
        return self._instant


class KernelClock:
    """The kernel's time, for production code that accepts a clock."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def now(self) -> datetime:
        """Return the virtual instant."""
        return self._kernel.instant()

    def monotonic(self) -> float:
        """Return virtual seconds since the simulation began."""
        return self._kernel.now / SECOND

    async def sleep(self, seconds: float) -> None:
        """Raise NotImplementedError: simulated code never waits, the kernel calls it."""
        raise NotImplementedError("simulated code never waits")


def micros(duration: timedelta) -> int:
    """Return a duration in microseconds."""
    return duration // timedelta(microseconds=1)


def since_start(instant: datetime) -> int:
    """Return an instant as microseconds since the simulation began."""
    return micros(instant - EPOCH)


def coin(chance: Random) -> bool:
    """Return true or false, equally likely."""
    return chance.random() < 0.5


def seconds_drawn(chance: Random, low: int, high: int) -> int:
    """Return a duration from `low` to `high` seconds, in microseconds; short ones are likelier."""
    return int(low + (high - low) * chance.random() ** 2) * SECOND
