"""The request plane client: sends requests and receives streams over the connections to workers.

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
    """Sends the requests of one frontend or prober to workers, over the connections that `WorkerLinks` maintains."""

    def __init__(
        self,
        client: str,
        limits: PlaneLimits | None = None,
        dialers: Mapping[str, Dialer] | None = None,
        key: FleetKey | None = None,
    ) -> None:
        """Build a client that identifies itself to workers as `client`.

        `dialers` maps URL schemes to dialers; the TCP dialer is always included. `key` is the fleet key that workers must prove
        to know. If `key` is None, workers need not prove anything.
        """
        super().__init__(client, limits or PlaneLimits(), dialers or {}, key)
        self._numbers = itertools.count(1)  # stream numbers, which are unique over all connections

    # --- state of a worker ----------------------------------------------------------------------------------

    def _connection(self, worker: str, instance: str | None = None) -> WorkerConnection | None:
        """Return the live connection to a worker; None if there is none, or if it is to another instance than `instance`.

        This method must be fast, because routing a request calls it for each worker.
        """
        link = self.by_worker.get(worker)
        connection = link.connection if link is not None else None
        if connection is None or not connection.live or instance not in (None, connection.instance):
            return None
        return connection

    def reachable(self, worker: str, instance: str) -> bool:
        """Return whether this worker instance is connected, makes progress and is not draining."""
        connection = self._connection(worker, instance)
        return connection is not None and not connection.detector.stuck and not connection.draining

    def recently_heard(self, worker: str, instance: str) -> bool:
        """Return whether this worker instance is reachable and has sent a frame as recently as a live instance does.

        While the event loop of this process is blocked, it reads no frames, even if workers have sent some. The hang watch
        checks at regular times, so an overdue check means that the loop was blocked. If the next check is overdue, a worker's
        silence therefore counts only until the time at which the check was due. In all other cases, it counts until now.
        """
        # `_connection` is inlined here and in `external_load`, which saves 1 % of a request's time
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
        # the first test saves time, because a step of age 0 cannot be stuck
        if detector.age_s and detector.stuck:
            return False
        due = detector.heard_at + (limits.lately_busy_s if detector.open_streams else limits.lately_s)
        return self.watch.look_due <= due or asyncio.get_running_loop().time() <= due

    def why(self, worker: str) -> str:
        """Return why the last attempt to connect to a worker failed; empty if none has failed since the last connection."""
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
        """Return the part of the worker's load that other clients' requests cause; None if the worker is not connected."""
        link = self.by_worker.get(worker)
        connection = link.connection if link is not None else None
        return connection.load.external if connection is not None and connection.live else None

    def external_load_by_rank(self, worker: str) -> Sequence[Load]:
        """Return the load that other clients' requests cause, for each DP rank of the worker.

        The result is empty if the worker is not connected, has a single rank, or does not report the load of its ranks.
        """
        connection = self._connection(worker)
        return connection.load.external_by_rank if connection is not None else ()

    # --- streams ------------------------------------------------------------------------------------------

    def open(self, worker: str, instance: str, request: Generate, sink: Sink) -> int:
        """Send a request to a worker instance and return the number of its stream. `sink` receives the stream's output.

        Raise WorkerUnreachable if the instance is not connected.
        """
        stream = next(self._numbers)
        self._connected_to(worker, instance).open(stream, request, sink)
        return stream

    def _connected_to(self, worker: str, instance: str) -> WorkerConnection:
        connection = self._connection(worker, instance)
        if connection is None:
            raise WorkerUnreachable(f"{worker} ({instance}) is not connected")
        return connection

    def cancel(self, worker: str, stream: int, why: Why = "gone") -> None:
        """Drop a stream or a reservation and notify the worker. Later frames and unknown streams are ignored."""
        connection = self._connection(worker)
        if connection is not None:
            connection.cancel(stream, why)

    def draining(self, worker: str, instance: str) -> bool:
        """Return whether this worker instance is connected and has reported that it accepts no new requests."""
        connection = self._connection(worker, instance)
        return connection is not None and connection.draining

    def reserve(self, worker: str, instance: str, request: Generate, room: int, sink: TransferSink) -> int:
        """Command a worker instance to reserve KV blocks for `room` tokens of a request.

        The request moves to this instance together with its KV cache. Return the number of the new stream. Raise
        WorkerUnreachable if the instance is not connected or does not read its input, or if the request is too large.
        """
        stream = next(self._numbers)
        self._connected_to(worker, instance).reserve(stream, request, room, sink)
        return stream

    def ship(self, source: TrustedSource, stream: int, offer: Reserved, sink: TransferSink) -> None:
        """Command the worker `source` to send a stream's KV cache to the target that has reserved blocks (`offer`).

        Raise WorkerUnreachable if the source is not connected or does not read its input, or if the stream has ended.
        """
        connection = self._connected_to(source.worker, source.instance)
        connection.ship(stream, offer.grants, sink)

    def stay(self, worker: str, stream: int) -> None:
        """Command a worker to abort the transfer of a stream's KV cache and continue decoding. Unknown streams are ignored."""
        connection = self._connection(worker)
        if connection is not None:
            connection.stay(stream)

    def adopt(self, worker: str, stream: int, sink: Sink) -> None:
        """Replace the sink that receives a stream's output. Unknown streams are ignored."""
        connection = self._connection(worker)
        if connection is not None:
            connection.adopt(stream, sink)

    async def ask(self, worker: str, request: Generate) -> AsyncGenerator[Chunk]:
        """Send a request and yield the chunks of its answer, including the final one.

        The caller sets the deadline. Raise WorkerUnreachable if the worker cannot be reached or its connection breaks.
        """
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
        """Return whether the engine serves other requests "before" one of this client or "beside" (together with) it.

        "" if unknown, or without a connection. `own_tokens` is the number of tokens of the client's request, and `begun` is true
        if its answer has begun. See `Prober.others_work`.
        """
        connection = self._connection(worker)
        return "" if connection is None else connection.others_work(own_tokens, begun=begun)


def cover_name() -> str:
    """Return a random name of the form that frontends have, so that workers cannot tell the prober from a frontend."""
    return f"frontend-{100 + secrets.randbelow(900)}"


class ProbePlanes:
    """The prober of one controller, with one client for marked canaries and one for unmarked canaries.

    A marked canary bypasses the prefix cache, takes no slot and does not count as a user's request. A compromised worker could
    answer marked canaries correctly and users' requests wrongly. Therefore some canaries carry no mark
    (`controller.runtime.canary.unmarked`). Unmarked canaries use a separate connection with a name of the form that frontends
    have. A worker gets unmarked canaries only if its Welcome declares that it answers marked and unmarked requests in the same
    form (`alike`, since 0.3). If `unmarked` is None, all canaries are marked.
    """

    def __init__(self, marked: RequestPlaneClient, unmarked: RequestPlaneClient | None = None) -> None:
        self.marked = marked
        self.unmarked = unmarked
        self._asked: Counter[str] = Counter()  # number of unmarked canaries in flight, by worker

    async def run(self) -> None:
        """Maintain the connections until cancelled."""
        async with asyncio.TaskGroup() as group:
            for plane in filter(None, (self.marked, self.unmarked)):
                group.create_task(plane.run())

    def set_workers(self, addresses: Mapping[str, Address]) -> None:
        """Set the workers to connect to, with their addresses. Connections to all other workers are closed."""
        for plane in filter(None, (self.marked, self.unmarked)):
            plane.set_workers(addresses)

    async def ask(self, worker: str, request: Generate) -> AsyncGenerator[Chunk]:
        """Send a canary and yield the chunks of its answer, including the final one.

        An unmarked canary is sent as a marked one if the worker does not support unmarked ones. The caller sets the deadline.
        Raise WorkerUnreachable if the worker cannot be reached or its connection breaks.
        """
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
        """Return whether the engine serves other requests "before" the canary or "beside" (together with) it.

        "" if unknown. `own_tokens` is the number of tokens of the canary, and `begun` is true if its answer has begun. See
        `Prober.others_work`.
        """
        plane = self.unmarked if self.unmarked is not None and self._asked[worker] else self.marked
        return plane.others_work(worker, own_tokens, begun=begun)

    @staticmethod
    def _alike(plane: RequestPlaneClient, worker: str) -> bool:
        welcomes = plane.welcomes
        return worker in welcomes and welcomes[worker].alike
