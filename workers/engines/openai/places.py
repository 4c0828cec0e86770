"""How many requests may be with the upstream at once? Those beyond it wait here, by priority, then first come, first served.

A server's own scheduler cannot be told to run less than it was started with: what it is not given, it does not run.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from heapq import heapify, heappop, heappush


class Places:
    """So many places at the upstream; without a limit as many as are asked for."""

    def __init__(self) -> None:
        self._limit: int | None = None
        self._taken = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap
        self._numbered = 0

    def limit(self, most: int | None) -> None:
        """Let no more take a place from now on than leave `most` taken. Who has one keeps it; None: no limit."""
        self._limit = most
        self._let_in()

    @contextlib.asynccontextmanager
    async def one(self, priority: int = 0) -> AsyncIterator[None]:
        """Have a place, as soon as there is one. Of those that wait the least `priority` goes first."""
        await self._take(priority)
        try:
            yield
        finally:
            self._give()

    async def _take(self, priority: int) -> None:
        if not self._waiting and self._fits():
            self._taken += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._numbered += 1
        heappush(self._waiting, place := (priority, self._numbered, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give()
            else:
                self._waiting.remove(place)
                heapify(self._waiting)
            raise

    def _give(self) -> None:
        self._taken -= 1
        self._let_in()

    def _fits(self) -> bool:
        return self._limit is None or self._taken < self._limit

    def _let_in(self) -> None:
        while self._waiting and self._fits():
            _, _, turn = heappop(self._waiting)
            if not turn.done():
                self._taken += 1
                turn.set_result(None)
