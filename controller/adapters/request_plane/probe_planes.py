"""The connections over which canaries are asked: marked ones, and such as look like a user's request.

A marked canary goes past the prefix cache, takes no place and is no user's request. A worker that was taken over can answer
it well and users' requests wrongly. So some questions carry no mark (`controller.runtime.canary.unmarked`) and come on a
connection of their own, under a name as frontends have. A worker must say in its Welcome that it answers both alike (`alike`,
since 0.3); to others all are marked.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from msgspec.structs import replace

from controller.adapters.request_plane.client import RequestPlaneClient
from controller.adapters.request_plane.links import Address
from controller.ports import OthersWork
from events.wire import Chunk, Generate


def cover_name() -> str:
    """Return a name as frontends have, which none of them has: a worker tells frontends apart by it."""
    return f"frontend-{100 + secrets.randbelow(900)}"


class ProbePlanes:
    """The prober of one controller. `unmarked` is None where every canary is marked."""

    def __init__(self, marked: RequestPlaneClient, unmarked: RequestPlaneClient | None = None) -> None:
        self.marked = marked
        self.unmarked = unmarked
        self._asked: Counter[str] = Counter()  # unmarked questions that are open, by worker

    async def run(self) -> None:
        """Keep the connections up until cancelled."""
        async with asyncio.TaskGroup() as group:
            for plane in filter(None, (self.marked, self.unmarked)):
                group.create_task(plane.run())

    def want(self, addresses: Mapping[str, Address]) -> None:
        """Be connected to exactly these workers."""
        for plane in filter(None, (self.marked, self.unmarked)):
            plane.want(addresses)

    async def ask(self, worker: str, request: Generate) -> AsyncGenerator[Chunk]:
        """Yield the worker's chunks until one ends; the deadline is the caller's. Raise WorkerUnreachable."""
        plane = self.unmarked
        if request.canary or plane is None or not self._alike(plane, worker):
            marked = request if request.canary else replace(request, canary=True)
            async with aclosing(self.marked.ask(worker, marked)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        self._asked[worker] += 1
        try:
            async with aclosing(plane.ask(worker, request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._asked[worker] -= 1
            if not self._asked[worker]:
                del self._asked[worker]

    def others_work(self, worker: str, own_tokens: int, *, begun: bool) -> OthersWork:
        """Return whether the worker's engine is known to get on with other requests: see `Prober`."""
        plane = self.unmarked if self.unmarked is not None and self._asked[worker] else self.marked
        return plane.others_work(worker, own_tokens, begun=begun)

    @staticmethod
    def _alike(plane: RequestPlaneClient, worker: str) -> bool:
        welcomes = plane.links.welcomes
        return worker in welcomes and welcomes[worker].alike
