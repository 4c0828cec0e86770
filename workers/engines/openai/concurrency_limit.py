"""Limits the requests that run at the upstream at once; the others wait here, by priority.

Requests of equal priority are served first come, first served.

A server's scheduler fixes its batch size at the start. The only way to reduce the batch is to send fewer requests.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from heapq import heapify, heappop, heappush


class Places:
    """A limited number of request slots at the upstream; unlimited until `limit` is called."""

    def __init__(self) -> None:
        self._limit: int | None = None
        self._taken = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap
        self._numbered = 0

    def limit(self, most: int | None) -> None:
        """Set the number of slots; None: no limit. A request that has a slot keeps it."""
        self._limit = most
        self._admit_waiting()

    @contextlib.asynccontextmanager
    async def one(self, priority: int = 0) -> AsyncIterator[None]:
        """Wait for a free slot and hold it. The lowest `priority` goes first."""
        await self._acquire(priority)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, priority: int) -> None:
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
                self._release()
            else:
                self._waiting.remove(place)
                heapify(self._waiting)
            raise

    def _release(self) -> None:
        self._taken -= 1
        self._admit_waiting()

    def _fits(self) -> bool:
        return self._limit is None or self._taken < self._limit

    def _admit_waiting(self) -> None:
        while self._waiting and self._fits():
            _, _, turn = heappop(self._waiting)
            if not turn.done():
                self._taken += 1
                turn.set_result(None)
