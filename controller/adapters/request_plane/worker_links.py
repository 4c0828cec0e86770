"""Maintains one connection to every wanted worker.

    want({worker: address}) ── dial ── Hello/Welcome ── live ── broken or hung ──▶ streams notified at once
                                 ▲                                  │
                                 └──── backoff, jittered ◀──────────┘

The TCP dialer needs neither broker nor database: even with both down, connections stay open, and broken ones are reopened.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import structlog
import xxhash

from controller.adapters.request_plane.connection import FRAMES, WorkerConnection
from controller.adapters.request_plane.dialers import Dialer, TcpDialer
from controller.adapters.request_plane.hang import HangPolicy, Process
from controller.ports import WorkerUnreachable
from events.fleet_key import FleetKey
from events.intrusion.send_budget import TrafficLimit
from events.observations import WorkerJoined
from events.subjects import PLANE_SCHEME
from events.wire import Welcome

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class HangWatch:
    """Judges the live connections twenty times a second, and ends the streams of those that hang.

    `hang` judges a single worker. The watch excludes our own lag before any worker is judged, reads our sockets first, and
    attributes a silence of all workers at once to this process for a while.
    """

    policy: HangPolicy
    connections: Callable[[], Mapping[str, WorkerConnection]]  # the live ones, by worker
    processes: Callable[[], Iterable[Process]]  # of the workers
    changed: Callable[[], None]  # called after a worker was found hung
    look_due: float = inf  # our next look: time beyond it is our own loop's lag
    hangs: int = 0
    late_ticks: int = 0
    _all_silent_since: float | None = None

    async def run(self) -> None:
        """Judge every connection at each tick, after excluding our own lag and reading our sockets."""
        loop, policy = asyncio.get_running_loop(), self.policy
        due = self.look_due = loop.time() + policy.tick_s
        while True:
            await asyncio.sleep(max(0.0, due - loop.time()))
            now = loop.time()
            if now - due > policy.lag_s:
                self.late_ticks += 1
                self._excuse(now - due, now)
            due = self.look_due = now + policy.tick_s
            for process in self.processes():
                process.look_due = due
            suspects = [
                connection for connection in self.connections().values() if connection.detector.suspect(now)
            ]
            if suspects:
                await asyncio.sleep(policy.lag_s / 2)  # whole loop turns: bytes that have arrived are read
                self._judge([connection for connection in suspects if not connection.readable()], loop.time())
            else:
                self._all_silent_since = None

    def _excuse(self, lag_s: float, now: float) -> None:
        """Exclude our own lag from every worker's silence."""
        for process in self.processes():
            process.excuse(lag_s, now)
        for connection in self.connections().values():
            connection.detector.excuse(lag_s, now)

    def _judge(self, suspects: list[WorkerConnection], now: float) -> None:
        policy, connections = self.policy, self.connections()
        guilty = [(connection, why) for connection in suspects if (why := connection.detector.suspect(now))]
        busy = [connection for connection in connections.values() if connection.detector.open_streams]
        if len(guilty) > 1 and len(guilty) == len(busy):
            self._all_silent_since = self._all_silent_since or now
            if now - self._all_silent_since < policy.all_silent_s:
                return  # all at once: more likely a fault of this process
        for connection, why in guilty:
            self.hangs += 1
            worker = next((name for name, one in connections.items() if one is connection), "?")
            log.warning("worker_hung", worker=worker, why=why, streams=connection.detector.open_streams)
            if connection.detector.silent_s(now) > policy.silence_s:
                connection.drop("stalled", why)  # drop all before any stream is routed to another worker
        for connection, why in guilty:
            connection.lose("stalled", why)  # a live loop reports when the engine makes progress again
        self.changed()


LOOK_S = 0.25  # interval at which a waiting caller checks whether the link is still the wanted one

log = structlog.get_logger(__name__)


class Address(NamedTuple):
    """The address of one worker instance: `tcp://host:port`, or `nats:plane.WORKER.INSTANCE` behind the broker.

    Empty `instance`: any that answers. Workers of the same `process` may share an event loop; empty: a separate process."""

    instance: str
    url: str
    process: str = ""

    @classmethod
    def of(cls, joined: WorkerJoined) -> "Address":
        """Return the address of a worker that has joined."""
        return cls(joined.instance, joined.url, f"{joined.topology.host}:{joined.pid}")

    @property
    def scheme(self) -> str:
        """The URL's scheme."""
        return self.url.partition(":")[0]


@dataclass(frozen=True, slots=True)
class PlaneLimits:
    """Deadlines and bounds of connections."""

    connect_s: float = 1.0
    welcome_s: float = 5.0  # a process that starts 250 workers is late, and retries would make it later
    backoff_s_min: float = 0.05
    backoff_s_max: float = 2.0
    ask_connect_s: float = 1.0  # wait of a probe for a connection that is being reopened
    ask_connect_first_s: float = 5.0  # the same without a failed attempt: a thousand workers may join at once
    ask_chunks_max: int = 4096
    connections_max: int = 65_536  # a process needs open files for other purposes, too
    heard_s: float = 2.5  # age of a frame up to which a link is reported; an idle worker beats each second
    lately_s: float = 1.3  # a worker silent for longer is chosen last; an idle one beats each second
    lately_busy_s: float = 0.25  # the same with open streams of ours: it beats every 0.1 s
    hang: HangPolicy = field(default_factory=HangPolicy)
    frames: TrafficLimit = FRAMES  # of one worker's connection
    flood_pause_s: float = 30.0  # until a worker that exceeded `frames` is connected again


@dataclass(slots=True)
class WorkerLink:
    """The wanted connection to one instance, and its state."""

    worker: str
    address: Address
    process: Process | None
    connection: WorkerConnection | None = None
    task: asyncio.Task[None] | None = None
    failures: int = 0  # in a row
    why: str = ""  # reason of the last failed attempt
    up: asyncio.Event = field(default_factory=asyncio.Event)  # set while connected

    @property
    def instance(self) -> str:
        connection = self.live
        return connection.instance if connection is not None else self.address.instance

    @property
    def live(self) -> WorkerConnection | None:
        return self.connection if self.connection is not None and self.connection.live else None


class WorkerLinks:
    """All connections of one process to workers."""

    def __init__(
        self, client: str, limits: PlaneLimits, dialers: Mapping[str, Dialer], key: FleetKey | None = None
    ) -> None:
        """`client`: our name. `dialers`: by URL scheme, in addition to TCP's. `key`: the fleet key that workers must prove; None:
        no proof is required."""
        self.by_worker: dict[str, WorkerLink] = {}
        self._client = client
        self._limits = limits
        self._key = key
        self._processes: dict[str, Process] = {}
        self._dialers: dict[str, Dialer] = {"tcp": TcpDialer(), **dialers}
        self._group: asyncio.TaskGroup | None = None
        self.flooded: Callable[[str, str], None] = lambda worker, instance: None
        self._open = 0  # connections
        self._listeners: list[Callable[[], None]] = []
        self._notification: asyncio.Handle | None = None  # pending notification, at the end of this turn
        self.watch = HangWatch(limits.hang, self.standing, lambda: self._processes.values(), self._changed)

    async def run(self) -> None:
        """Maintain the wanted connections until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for link in self.by_worker.values():
                    self._start(link)
                await self.watch.run()
        finally:
            self._group = None
            for link in self.by_worker.values():
                if link.connection is not None:
                    link.connection.close()

    def want(self, addresses: Mapping[str, Address]) -> None:
        """Set the workers to be connected to; connections to all others are closed."""
        for worker, link in list(self.by_worker.items()):
            if addresses.get(worker) != link.address:
                del self.by_worker[worker]
                self._stop(link)
        self._update_processes(Counter(address.process for address in addresses.values()))
        for worker, address in addresses.items():
            if worker not in self.by_worker:
                link = self.by_worker[worker] = WorkerLink(
                    worker, address, self._processes.get(address.process)
                )
                self._start(link)

    def _update_processes(self, housed: Counter[str]) -> None:
        """Update the known processes and their numbers of workers."""
        now = asyncio.get_running_loop().time()
        del housed[""]
        self._processes = {name: self._processes.get(name) or Process(now) for name in housed}
        for name, process in self._processes.items():
            process.house(housed[name])

    def listen(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever a connection is opened, is closed, or changes its state."""
        self._listeners.append(changed)

    @property
    def connected(self) -> dict[str, str]:
        """The workers with a live connection, and their instances."""
        return {link.worker: link.instance for link in self.by_worker.values() if link.live is not None}

    @property
    def heard(self) -> dict[str, str]:
        """The connected workers that recently sent a frame: the content of the link report.

        A stopped process, or one behind a network that drops all packets, keeps its connection but sends no frames."""
        since = asyncio.get_running_loop().time() - self._limits.heard_s
        connections = ((link, link.live) for link in self.by_worker.values())
        return {
            k.worker: k.instance
            for k, connection in connections
            if connection is not None and connection.detector.heard_at >= since
        }

    @property
    def welcomes(self) -> dict[str, Welcome]:
        """The Welcome of each connected worker."""
        return {worker: connection.greeted.result() for worker, connection in self.standing().items()}

    @property
    def late_chunks(self) -> int:
        """Number of chunks of streams without a sink, over the live connections."""
        return sum(connection.late for connection in self.standing().values())

    def _start(self, link: WorkerLink) -> None:
        if self._group is not None and link.task is None:
            link.task = self._group.create_task(self._keep(link), name=f"link {link.worker}")

    def _stop(self, link: WorkerLink) -> None:
        if link.task is not None:
            link.task.cancel()
        if link.connection is not None:
            link.connection.abort("disconnected", f"{link.worker} ({link.address.instance}) is gone")

    def _changed(self) -> None:
        """Notify the listeners once per loop turn: a thousand joining workers need not cause a thousand notifications."""
        if self._notification is None:
            self._notification = asyncio.get_running_loop().call_soon(self._notify)

    def _notify(self) -> None:
        self._notification = None
        for listener in self._listeners:
            listener()

    def standing(self) -> dict[str, WorkerConnection]:
        """Return the live connections, by worker."""
        found = ((link.worker, link.live) for link in self.by_worker.values())
        return {worker: connection for worker, connection in found if connection is not None}

    async def awaited(self, worker: str) -> WorkerLink:
        """Return the link to a worker once it is live; wait for a limited time. Raise WorkerUnreachable."""
        loop, limits = asyncio.get_running_loop(), self._limits
        began = loop.time()
        while True:
            link = self.by_worker.get(worker)
            if link is not None and link.live is not None:
                return link
            first = link is not None and not link.failures
            left = began - loop.time() + (limits.ask_connect_first_s if first else limits.ask_connect_s)
            if left <= 0:
                raise WorkerUnreachable(f"{worker} is not connected")
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, LOOK_S)):
                    await (asyncio.sleep(LOOK_S) if link is None or link.up.is_set() else link.up.wait())

    # --- maintaining one connection -----------------------------------------------------------------------

    async def _keep(self, link: WorkerLink) -> None:
        while True:
            try:
                with self._counted(link):
                    connection = await self._dial(link)
                    link.failures, link.why = 0, ""
                    link.up.set()
                    log.info("worker_connected", worker=link.worker, instance=link.instance)
                    self._changed()
                    await connection.ended
                    if connection.budget.exceeded:
                        self.flooded(link.worker, link.instance)
                        link.connection = None
                        link.up.clear()
                        link.why = "it sent more than an engine can compute"
                        await asyncio.sleep(self._limits.flood_pause_s)
            except (OSError, TimeoutError, UnicodeError, WorkerUnreachable) as error:
                link.failures += 1
                link.why = str(error) or type(error).__name__
                if link.failures in (1, 10):
                    log.info("worker_unreachable", worker=link.worker, url=link.address.url, error=link.why)
                await asyncio.sleep(self._backoff_s(link))
                continue
            link.connection = None
            link.up.clear()
            await asyncio.sleep(self._backoff_s(link))

    @contextmanager
    def _counted(self, link: WorkerLink) -> Iterator[None]:
        """Count a connection from its first attempt to its end. Raise WorkerUnreachable if the limit is reached."""
        own, most = link.address.scheme != PLANE_SCHEME, self._limits.connections_max
        if own and self._open >= most:
            raise WorkerUnreachable(f"this process may open at most {most} connections (ulimit -Hn)")
        self._open += own
        try:
            yield
        finally:
            self._open -= own

    async def _dial(self, link: WorkerLink) -> WorkerConnection:
        dialer, limits = self._dialer(link.address.scheme), self._limits

        def make(kind: type[WorkerConnection]) -> WorkerConnection:
            return kind(self._client, limits.hang, self._changed, link.process, self._key, limits.frames)

        await dialer.ready()
        async with asyncio.timeout(self._limits.connect_s):
            connection = await dialer.connect(link.address.url, make)
        link.connection = connection
        try:
            async with asyncio.timeout(self._limits.welcome_s):
                await asyncio.wait((connection.greeted,))
            if connection.greeted.cancelled():
                raise WorkerUnreachable(connection.stranger or "it closed the connection without a welcome")
            welcome = connection.greeted.result()
            known = not link.address.instance or welcome.instance == link.address.instance
            if not known or (link.address.instance and welcome.worker != link.worker):
                raise WorkerUnreachable(f"{link.address.url} is {welcome.worker} ({welcome.instance}) now")
        except BaseException:
            link.connection = None
            connection.abort("cannot_connect", "no welcome")
            raise
        return connection

    def _dialer(self, scheme: str) -> Dialer:
        if scheme == PLANE_SCHEME and scheme not in self._dialers:
            raise WorkerUnreachable(
                "it is only reachable through the broker: start this process with --request-plane nats"
            )
        return self._dialers.get(scheme, self._dialers["tcp"])

    def _backoff_s(self, link: WorkerLink) -> float:
        """Return the wait before the next attempt: doubling, times a hash-based 0.5 to 1 that spreads frontends."""
        limits = self._limits
        whole = min(limits.backoff_s_max, limits.backoff_s_min * 2 ** min(link.failures, 16))
        spread = xxhash.xxh32_intdigest(f"{self._client} {link.worker} {link.failures}".encode()) / 2**32
        return float(whole * (0.5 + spread / 2))
