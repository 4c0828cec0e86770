"""The client side of the request plane: streams over the connections that `links` maintains.

Implements `controller.ports.RequestPlane` for frontends and `controller.ports.Prober` for the canary loop.
"""

import asyncio
import itertools
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

from msgspec.structs import replace

from controller.adapters.request_plane.connection import StreamReader, WorkerConnection
from controller.adapters.request_plane.dialers import Dialer
from controller.adapters.request_plane.worker_links import Address, PlaneLimits, WorkerLinks
from controller.ports import OthersWork, Sink, TransferSink, WorkerUnreachable
from controller.router.trust import TrustedSource
from events.fleet_key import FleetKey
from events.wire import Chunk, Generate, Load, Reserved, Why


class RequestPlaneClient(WorkerLinks):
    """All streams of one frontend or prober, over the connections that `WorkerLinks` maintains."""

    def __init__(
        self,
        client: str,
        limits: PlaneLimits | None = None,
        dialers: Mapping[str, Dialer] | None = None,
        key: FleetKey | None = None,
    ) -> None:
        """`dialers`: by URL scheme; `tcp:` is always included. `key`: the fleet key that workers must prove; None: no proof is
        required."""
        super().__init__(client, limits or PlaneLimits(), dialers or {}, key)
        self._numbers = itertools.count(1)  # stream numbers; unique over all connections

    # --- state of a worker ----------------------------------------------------------------------------------

    def _connection(self, worker: str, instance: str | None = None) -> WorkerConnection | None:
        """Return the connection to a worker, or to this instance of it. Called per worker for each request that is routed."""
        link = self.by_worker.get(worker)
        connection = link.connection if link is not None else None
        if connection is None or not connection.live or instance not in (None, connection.instance):
            return None
        return connection

    def reachable(self, worker: str, instance: str) -> bool:
        """Return whether this instance is connected, and neither stuck nor leaving."""
        connection = self._connection(worker, instance)
        return connection is not None and not connection.detector.stuck and not connection.draining

    def recently_heard(self, worker: str, instance: str) -> bool:
        """Return whether this instance is reachable, and has sent a frame as recently as a live instance does. While our loop is
        blocked it reads no frames, so time beyond the watch's next check does not count."""
        # `_connection` inlined: called per worker and request, like `external_load`; saves 1 % of a request
        link = self.by_worker.get(worker)
        connection = link.connection if link is not None else None
        if (
            connection is None
            or connection.draining
            or not connection.live
            or connection.instance != instance
        ):
            return False
        detector, limits = connection.detector, self._limits
        if detector.age_s and detector.stuck:  # the first test is for speed: a step of age 0 cannot be stuck
            return False
        due = detector.heard_at + (limits.lately_busy_s if detector.open_streams else limits.lately_s)
        return self.watch.look_due <= due or asyncio.get_running_loop().time() <= due

    def why(self, worker: str) -> str:
        """Return why the last attempt to connect to a worker failed; empty if none has failed since its last connection."""
        link = self.by_worker.get(worker)
        return "" if link is None else link.why

    def load(self, worker: str) -> Load | None:
        """Return the load that the worker reported last; None if it is not connected."""
        connection = self._connection(worker)
        return connection.load.total if connection is not None else None

    def load_by_rank(self, worker: str) -> Sequence[Load]:
        """Return the load that the worker reported last for each of its DP ranks; empty if it is not connected."""
        connection = self._connection(worker)
        return connection.load.by_rank if connection is not None else ()

    def external_load(self, worker: str) -> Load | None:
        """Return the worker's load by other clients' requests; None if it is not connected."""
        link = self.by_worker.get(worker)
        connection = link.connection if link is not None else None
        return connection.load.external if connection is not None and connection.live else None

    def external_load_by_rank(self, worker: str) -> Sequence[Load]:
        """Return the same per DP rank; empty if the worker has only one, or does not report it."""
        connection = self._connection(worker)
        return connection.load.external_by_rank if connection is not None else ()

    # --- streams ------------------------------------------------------------------------------------------

    def open(self, worker: str, instance: str, request: Generate, sink: Sink) -> int:
        """Send a request and return its stream number. Raise WorkerUnreachable."""
        stream = next(self._numbers)
        self._connected_to(worker, instance).open(stream, request, sink)
        return stream

    def _connected_to(self, worker: str, instance: str) -> WorkerConnection:
        connection = self._connection(worker, instance)
        if connection is None:
            raise WorkerUnreachable(f"{worker} ({instance}) is not connected")
        return connection

    def cancel(self, worker: str, stream: int, why: Why = "gone") -> None:
        """Drop a stream or a reservation, notify the worker, and ignore late frames. Unknown streams are ignored."""
        connection = self._connection(worker)
        if connection is not None:
            connection.cancel(stream, why)

    def draining(self, worker: str, instance: str) -> bool:
        """Return whether this instance is connected and has signalled that it accepts no new requests."""
        connection = self._connection(worker, instance)
        return connection is not None and connection.draining

    def reserve(self, worker: str, instance: str, request: Generate, room: int, sink: TransferSink) -> int:
        """Ask a worker to reserve room for a request of `room` tokens; return the new stream. Raise WorkerUnreachable."""
        stream = next(self._numbers)
        self._connected_to(worker, instance).reserve(stream, request, room, sink)
        return stream

    def ship(self, source: TrustedSource, stream: int, offer: Reserved, sink: TransferSink) -> None:
        """Command a worker to send a stream to the target that made this offer. Raise WorkerUnreachable."""
        connection = self._connected_to(source.worker, source.instance)
        connection.ship(stream, offer.grants, sink)

    def stay(self, worker: str, stream: int) -> None:
        """Command a worker to stop a stream's shipment and to continue decoding. Unknown streams are ignored."""
        connection = self._connection(worker)
        if connection is not None:
            connection.stay(stream)

    def adopt(self, worker: str, stream: int, sink: Sink) -> None:
        """Attach another sink to a stream. Unknown streams are ignored."""
        connection = self._connection(worker)
        if connection is not None:
            connection.adopt(stream, sink)

    async def ask(self, worker: str, request: Generate) -> AsyncGenerator[Chunk]:
        """Yield the worker's chunks until one finishes; the caller sets the deadline. Raise WorkerUnreachable."""
        link = await self.awaited(worker)
        reader = StreamReader(self._limits.ask_chunks_max)
        stream = self.open(worker, link.instance, request, reader)
        try:
            while True:
                chunk = await reader.next()
                yield chunk
                if chunk.finish is not None or chunk.error is not None:
                    return
        finally:
            self.cancel(worker, stream)

    def others_work(self, worker: str, own_tokens: int, *, begun: bool) -> OthersWork:
        """Return how the engine serves other requests: see `Prober`."""
        connection = self._connection(worker)
        return "" if connection is None else connection.others_work(own_tokens, begun=begun)


def cover_name() -> str:
    """Return a name that looks like a frontend's but belongs to none: workers distinguish frontends by name."""
    return f"frontend-{100 + secrets.randbelow(900)}"


class ProbePlanes:
    """The prober of one controller: a connection for marked canaries, and one for questions that look like users' requests.

    A marked canary bypasses the prefix cache, takes no slot and is no user's request. A compromised worker can answer it
    correctly and users' requests wrongly. So some questions carry no mark (`controller.runtime.canary.unmarked`). They use a
    separate connection, under a name like a frontend's. This requires that the worker's Welcome declares that it answers both
    alike (`alike`, since 0.3); for other workers, all questions are marked. `unmarked` is None if every canary is marked.
    """

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
        welcomes = plane.welcomes
        return worker in welcomes and welcomes[worker].alike
