"""The request plane's client side: one connection to every worker that is wanted, kept up, and judged.

    want({worker: address}) ── dial ── Hello/Welcome ── live ── broken or hung ──▶ streams told at once
                                 ▲                                  │
                                 └──── backoff, jittered ◀──────────┘

Implements `controller.ports.Plane` for frontends and `controller.ports.Prober` for the canary loop. Its direct way to
workers needs no broker and no database: with both dead, it goes on.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog
import xxhash

from controller.adapters.hang import HangPolicy, Process
from controller.adapters.hang_watch import HangWatch
from controller.adapters.ways import DirectWay, Way
from controller.adapters.worker_line import Line, Reader
from controller.ports import Carrier, Sink, WorkerUnreachable
from controller.router.trust import Trusted
from events.observations import WorkerJoined
from events.subjects import PLANE_SCHEME
from events.wire import Chunk, Generate, Load, Reserved, Welcome, Why

LOOK_S = 0.25  # how often one who waits for a connection looks whether it is still the one that is wanted

log = structlog.get_logger(__name__)


class Address(NamedTuple):
    """Where one instance of a worker listens: `tcp://host:port`, or `nats:plane.WORKER.INSTANCE` behind the broker.
    An empty instance: whoever answers there. Workers of the same `process` may share its event loop; empty: it has its own."""

    instance: str
    url: str
    process: str = ""

    @classmethod
    def of(cls, joined: WorkerJoined) -> "Address":
        """Return where a worker is that has joined."""
        return cls(joined.instance, joined.url, f"{joined.topology.host}:{joined.pid}")


@dataclass(frozen=True, slots=True)
class PlaneLimits:
    """The deadlines and bounds of connections."""

    connect_s: float = 1.0
    welcome_s: float = 5.0  # who starts 250 workers is late; asking again and again makes it later
    backoff_s_min: float = 0.05
    backoff_s_max: float = 2.0
    ask_connect_s: float = 1.0  # how long a probe waits for a connection that is being made again
    ask_connect_first_s: float = 5.0  # and for one that was not tried in vain: a thousand may join at once
    ask_chunks_max: int = 4096
    connections_max: int = 65_536  # a process has open files for other things, too
    heard_s: float = (
        2.5  # an idle worker beats each second: we vouch for nobody whom we have not heard for longer
    )
    lately_s: float = 1.3  # an idle worker beats each second: who is silent for longer is asked last
    lately_busy_s: float = 0.25  # one with streams of ours beats every 0.1 s
    hang: HangPolicy = field(default_factory=HangPolicy)


@dataclass(slots=True)
class _Link:
    """The wish to be connected to one instance, and what has become of it."""

    worker: str
    address: Address
    process: Process | None
    line: Line | None = None
    task: asyncio.Task[None] | None = None
    failures: int = 0  # in a row
    up: asyncio.Event = field(default_factory=asyncio.Event)  # a flag: it is connected

    @property
    def instance(self) -> str:
        line = self.live
        return line.instance if line is not None else self.address.instance

    @property
    def live(self) -> Line | None:
        return self.line if self.line is not None and self.line.live else None


class RequestPlane:
    """All connections of one frontend (or prober)."""

    def __init__(self, frontend: str, limits: PlaneLimits | None = None) -> None:
        self._frontend = frontend
        self._limits = limits or PlaneLimits()
        self._links: dict[str, _Link] = {}
        self._processes: dict[str, Process] = {}
        self._ways: dict[str, Way] = {"tcp": DirectWay()}
        self._group: asyncio.TaskGroup | None = None
        self._open = 0  # connections
        self._streams = itertools.count(1)  # never used twice, over all connections
        self._listeners: list[Callable[[], None]] = []
        self._telling: asyncio.Handle | None = None  # of the listeners, at the end of this turn
        self.watch = HangWatch(
            self._limits.hang, self._lines, lambda: self._processes.values(), self._changed
        )

    # --- whom to be connected to --------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the wanted connections up until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for link in self._links.values():
                    self._start(link)
                await self.watch.run()
        finally:
            self._group = None
            for link in self._links.values():
                if link.line is not None:
                    link.line.close()

    def reach(self, scheme: str, way: Way) -> None:
        """From now on, reach workers whose address begins with `scheme:` this way."""
        self._ways[scheme] = way

    def want(self, addresses: Mapping[str, Address]) -> None:
        """Be connected to exactly these workers."""
        for worker, link in list(self._links.items()):
            if addresses.get(worker) != link.address:
                del self._links[worker]
                self._stop(link)
        self._house(Counter(address.process for address in addresses.values()))
        for worker, address in addresses.items():
            if worker not in self._links:
                link = self._links[worker] = _Link(worker, address, self._processes.get(address.process))
                self._start(link)

    def _house(self, housed: Counter[str]) -> None:
        """Know which processes there are, by how many workers each has."""
        now = asyncio.get_running_loop().time()
        del housed[""]
        self._processes = {name: self._processes.get(name) or Process(now) for name in housed}
        for name, process in self._processes.items():
            process.shared = housed[name] > 1

    def listen(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever a connection came, went, or changed its standing."""
        self._listeners.append(changed)

    @property
    def connected(self) -> dict[str, str]:
        """The workers with a standing connection, and their instances."""
        return {link.worker: link.instance for link in self._links.values() if link.live is not None}

    @property
    def heard(self) -> dict[str, str]:
        """Of those, who said something lately: what the links report says. A stopped process, or one behind a network
        that swallows everything, keeps its connection and says nothing."""
        since = asyncio.get_running_loop().time() - self._limits.heard_s
        lines = ((link, link.live) for link in self._links.values())
        return {
            k.worker: k.instance for k, line in lines if line is not None and line.pulse.heard_at >= since
        }

    @property
    def welcomes(self) -> dict[str, Welcome]:
        """What each connected worker said of itself."""
        return {worker: line.greeted.result() for worker, line in self._lines().items()}

    @property
    def late_chunks(self) -> int:
        """Chunks of streams that nobody reads any more, over the connections that stand."""
        return sum(line.late for line in self._lines().values())

    def _start(self, link: _Link) -> None:
        if self._group is not None and link.task is None:
            link.task = self._group.create_task(self._keep(link), name=f"link {link.worker}")

    def _stop(self, link: _Link) -> None:
        if link.task is not None:
            link.task.cancel()
        if link.line is not None:
            link.line.abort("disconnected", f"{link.worker} ({link.address.instance}) is gone")

    def _changed(self) -> None:
        """Tell the listeners, once in a turn of the loop: a thousand workers that join are not a thousand news."""
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._telling = None
        for listener in self._listeners:
            listener()

    # --- keeping one connection up ------------------------------------------------------------------------

    async def _keep(self, link: _Link) -> None:
        while True:
            try:
                with self._counted(link):
                    line = await self._dial(link)
                    link.failures = 0
                    link.up.set()
                    log.info("worker_connected", worker=link.worker, instance=link.instance)
                    self._changed()
                    await line.ended
            except (OSError, TimeoutError, UnicodeError, WorkerUnreachable) as error:
                link.failures += 1
                if link.failures in (1, 10):
                    log.info(
                        "worker_unreachable",
                        worker=link.worker,
                        url=link.address.url,
                        error=str(error) or type(error).__name__,
                    )
                await asyncio.sleep(self._backoff_s(link))
                continue
            link.line = None
            link.up.clear()
            await asyncio.sleep(self._backoff_s(link))

    @contextmanager
    def _counted(self, link: _Link) -> Iterator[None]:
        """Count a connection, from when it is wanted to its end. Raise WorkerUnreachable where there may be no more of them."""
        own, most = not link.address.url.startswith(PLANE_SCHEME), self._limits.connections_max
        if own and self._open >= most:
            raise WorkerUnreachable(f"{most} connections are all that this process may have (ulimit -Hn)")
        self._open += own
        try:
            yield
        finally:
            self._open -= own

    async def _dial(self, link: _Link) -> Line:
        way = self._way(link.address.url)
        await way.ready()
        async with asyncio.timeout(self._limits.connect_s):
            line = await way.connect(
                link.address.url,
                lambda kind: kind(self._frontend, self._limits.hang, self._changed, link.process),
            )
        link.line = line
        try:
            async with asyncio.timeout(self._limits.welcome_s):
                await asyncio.wait((line.greeted,))
            if line.greeted.cancelled():
                raise WorkerUnreachable("it closed the connection without a welcome")
            welcome = line.greeted.result()
            known = not link.address.instance or welcome.instance == link.address.instance
            if not known or (link.address.instance and welcome.worker != link.worker):
                raise WorkerUnreachable(f"{link.address.url} is {welcome.worker} ({welcome.instance}) now")
        except BaseException:
            link.line = None
            line.abort("cannot_connect", "no welcome")
            raise
        return line

    def _way(self, url: str) -> Way:
        scheme = url.partition(":")[0]
        if scheme == PLANE_SCHEME and scheme not in self._ways:
            raise WorkerUnreachable(
                "it is reached through the broker: start this process with --request-plane nats"
            )
        return self._ways.get(scheme, self._ways["tcp"])

    def _backoff_s(self, link: _Link) -> float:
        """Return the wait before the next attempt: doubling, times 0.5…1 by a hash: frontends spread."""
        limits = self._limits
        whole = min(limits.backoff_s_max, limits.backoff_s_min * 2 ** min(link.failures, 16))
        spread = xxhash.xxh32_intdigest(f"{self._frontend} {link.worker} {link.failures}".encode()) / 2**32
        return float(whole * (0.5 + spread / 2))

    # --- streams ------------------------------------------------------------------------------------------

    def _line(self, worker: str, instance: str | None = None) -> Line | None:
        """Return the line to a worker, or to this instance of it. Asked for each worker by each request's choice of one."""
        link = self._links.get(worker)
        line = link.line if link is not None else None
        if line is None or not line.live or (instance is not None and line.instance != instance):
            return None
        return line

    def reachable(self, worker: str, instance: str) -> bool:
        """Say whether this instance is connected, and neither stuck nor leaving."""
        line = self._line(worker, instance)
        return line is not None and not line.pulse.stuck and not line.draining

    def lately(self, worker: str, instance: str) -> bool:
        """Say whether this instance is reachable, and was heard as lately as one that lives is. While our loop stood still we
        heard nobody: time beyond the watch's next look does not count."""
        link = self._links.get(worker)  # `_line`, spelled out: asked twice a request
        line = link.line if link is not None else None
        if line is None or not line.live or line.instance != instance or line.draining:
            return False
        pulse, limits = line.pulse, self._limits
        if pulse.age_s and pulse.stuck:  # a step that has just begun is nobody's who is stuck
            return False
        due = pulse.heard_at + (limits.lately_busy_s if pulse.open_streams else limits.lately_s)
        return self.watch.look_due <= due or asyncio.get_running_loop().time() <= due

    def load(self, worker: str) -> Load | None:
        """Return the load that the worker reported last; None if it is not connected."""
        line = self._line(worker)
        return line.load if line is not None else None

    def others(self, worker: str) -> Load | None:
        """Return what requests that are not ours load the worker with; None if it is not connected."""
        link = self._links.get(worker)  # `_line`, spelled out: asked of each worker, twice a request
        line = link.line if link is not None else None
        return line.others if line is not None and line.live else None

    def others_by_rank(self, worker: str) -> Sequence[Load]:
        """Return the same for each of its DP ranks; nothing where it has only one, or does not say so."""
        line = self._line(worker)
        return line.others_by_rank if line is not None else ()

    def open(self, worker: str, instance: str, request: Generate, sink: Sink) -> int:
        """Send a request and return its stream number. Raise WorkerUnreachable."""
        stream = next(self._streams)
        self._standing(worker, instance).open(stream, request, sink)
        return stream

    def _standing(self, worker: str, instance: str) -> Line:
        line = self._line(worker, instance)
        if line is None:
            raise WorkerUnreachable(f"{worker} ({instance}) is not connected")
        return line

    def cancel(self, worker: str, stream: int, why: Why = "gone") -> None:
        """Forget a stream or a reservation: the worker is told, and late frames are dropped. Unknown ones are ignored."""
        line = self._line(worker)
        if line is not None:
            line.cancel(stream, why)

    def draining(self, worker: str, instance: str) -> bool:
        """Say whether this instance is connected and has told us to send it nothing new."""
        line = self._line(worker, instance)
        return line is not None and line.draining

    def reserve(self, worker: str, instance: str, request: Generate, room: int, carrier: Carrier) -> int:
        """Ask a worker to keep room for a request of `room` tokens; return the new stream. Raise WorkerUnreachable."""
        stream = next(self._streams)
        self._standing(worker, instance).reserve(stream, request, room, carrier)
        return stream

    def ship(self, source: Trusted, stream: int, offer: Reserved, carrier: Carrier) -> None:
        """Tell a worker to send a stream to the target that made this offer. Raise WorkerUnreachable."""
        line = self._standing(source.worker, source.instance)
        line.ship(stream, offer.grants, carrier)

    def stay(self, worker: str, stream: int) -> None:
        """Tell a worker to break a stream's shipment off, and to go on decoding it. Unknown streams are ignored."""
        line = self._line(worker)
        if line is not None:
            line.stay(stream)

    def adopt(self, worker: str, stream: int, sink: Sink) -> None:
        """Give a stream another sink. Unknown streams are ignored."""
        line = self._line(worker)
        if line is not None:
            line.adopt(stream, sink)

    async def ask(self, worker: str, request: Generate) -> AsyncIterator[Chunk]:
        """Yield the worker's chunks until one ends; the deadline is the caller's. Raise WorkerUnreachable."""
        link = await self._awaited(worker)
        reader = Reader(self._limits.ask_chunks_max)
        stream = self.open(worker, link.instance, request, reader)
        try:
            while True:
                chunk = await reader.next()
                yield chunk
                if chunk.finish is not None or chunk.error is not None:
                    return
        finally:
            self.cancel(worker, stream)

    def occupied(self, worker: str, own_tokens: int, *, begun: bool) -> bool:
        """Say whether the worker's engine gets on with others' work, before a question of ours: see `Prober`."""
        line = self._line(worker)
        return line is not None and line.occupied(own_tokens, begun=begun)

    async def _awaited(self, worker: str) -> _Link:
        """Return the standing connection to a worker, which may still be in the making. Raise WorkerUnreachable."""
        loop, limits = asyncio.get_running_loop(), self._limits
        began = loop.time()
        while True:
            link = self._links.get(worker)
            if link is not None and link.live is not None:
                return link
            first = link is not None and not link.failures
            left = began - loop.time() + (limits.ask_connect_first_s if first else limits.ask_connect_s)
            if left <= 0:
                raise WorkerUnreachable(f"{worker} is not connected")
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, LOOK_S)):
                    await (asyncio.sleep(LOOK_S) if link is None or link.up.is_set() else link.up.wait())

    def _lines(self) -> dict[str, Line]:
        """Return the connections that stand, by worker."""
        lines = ((link.worker, link.line) for link in self._links.values())
        return {worker: line for worker, line in lines if line is not None and line.live}
