"""One pool's line of requests with deadlines, as the queue asks it: whose turn it is, and who has left and how."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from controller.frontend.scheduling.queue import Room
from controller.router.admission.line import PlaceInLine
from controller.router.admission.pool import WorkerPool
from controller.router.load.monitor import WantedRoom

CLOCK_S = 0.005  # by which a timer may be early

R = TypeVar("R", bound=Room)


class DeadlineLine(Generic[R]):
    """One pool's."""

    def __init__(
        self,
        pool: "Callable[[], WorkerPool[asyncio.Future[R]]]",
        now: Callable[[], float],
        capacity: Callable[[], float],
        find: "Callable[[PlaceInLine[asyncio.Future[R]], WantedRoom], R]",
    ) -> None:
        self._pool = pool
        self._now = now
        self._capacity = capacity
        self._find = find
        self._places: dict[asyncio.Future[R], tuple[PlaceInLine[asyncio.Future[R]], WantedRoom]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> "Iterator[asyncio.Future[R]]":
        return iter(self._places)

    def push(self, place: "PlaceInLine[asyncio.Future[R]]", wanted: WantedRoom) -> None:
        """Let one wait that takes so much of a worker."""
        now = self._now()
        self._pool().pass_time(now, self._capacity())
        self._places[place.who] = place, wanted
        self._pool().push(place, now)

    def head(self) -> "asyncio.Future[R] | None":
        place = self._pool().line.head(self._now())
        return place.who if place is not None else None

    def take(self, turn: "asyncio.Future[R]") -> R:
        return self._find(*self._places[turn])

    def remove(self, turn: "asyncio.Future[R]") -> None:
        found = self._places.pop(turn, None)
        if found is None:
            return
        place = found[0]
        now, pool = self._now(), self._pool()
        pool.pass_time(now, self._capacity())
        if not turn.done() or turn.cancelled():
            pool.line.remove(place)
        elif turn.exception() is None:
            pool.served(place)
        elif now >= place.latest - CLOCK_S:
            pool.late(place)
        else:
            pool.line.remove(place)
