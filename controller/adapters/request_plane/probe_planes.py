"""The prober's connections: one for marked canaries, one for questions that look like users' requests.

A marked canary bypasses the prefix cache, takes no slot and is no user's request. A compromised worker can answer it correctly
and users' requests wrongly. So some questions carry no mark (`controller.runtime.canary.unmarked`). They use a separate
connection, under a name like a frontend's. This requires that the worker's Welcome declares that it answers both alike
(`alike`, since 0.3); for other workers, all questions are marked.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from msgspec.structs import replace

from controller.adapters.request_plane.client import RequestPlaneClient
from controller.adapters.request_plane.worker_links import Address
from controller.ports import OthersWork
from events.wire import Chunk, Generate


def cover_name() -> str:
    """Return a name that looks like a frontend's but belongs to none: workers distinguish frontends by name."""
    return f"frontend-{100 + secrets.randbelow(900)}"


class ProbePlanes:
    """The prober of one controller. `unmarked` is None if every canary is marked."""

    def __init__(self, marked: RequestPlaneClient, unmarked: RequestPlaneClient | None = None) -> None:
        self.marked = marked
        self.unmarked = unmarked
        self._asked: Counter[str] = Counter()  # open unmarked questions, by worker

    async def run(self) -> None:
        """Maintain the connections until cancelled."""
        async with asyncio.TaskGroup() as group:
            for plane in filter(None, (self.marked, self.unmarked)):
                group.create_task(plane.run())

    def want(self, addresses: Mapping[str, Address]) -> None:
        """Set the workers to be connected to; connections to all others are closed."""
        for plane in filter(None, (self.marked, self.unmarked)):
            plane.want(addresses)

    async def ask(self, worker: str, request: Generate) -> AsyncGenerator[Chunk]:
        """Yield the worker's chunks until one finishes; the caller sets the deadline. Raise WorkerUnreachable."""
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
        """Return how the engine serves other requests: see `Prober`."""
        plane = self.unmarked if self.unmarked is not None and self._asked[worker] else self.marked
        return plane.others_work(worker, own_tokens, begun=begun)

    @staticmethod
    def _alike(plane: RequestPlaneClient, worker: str) -> bool:
        welcomes = plane.links.welcomes
        return worker in welcomes and welcomes[worker].alike
