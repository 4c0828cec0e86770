"""Maintains one connection to each of the workers that were passed to `set_workers`.

    set_workers({worker: address}) ── dial ── Hello/Welcome ── live ── broken or hung ──▶ streams notified at once
                                        ▲                                  │
                                        └──── backoff, jittered ◀──────────┘

TCP connections do not need the broker or the database. While both are down, connections stay open, and broken ones are
reopened.
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
    """Checks the live connections twenty times a second, and ends the streams of hung workers.

    The module `hang` judges a single worker. The watch adds three measures, so that no worker is blamed for a fault of this
    process. First, time for which this process's event loop did not run does not count as a worker's silence. Second, the watch
    reads the sockets before it judges a worker. Third, if all workers are silent at once, the watch waits up to `all_silent_s`
    before it considers them hung.
    """

    policy: HangPolicy
    connections: Callable[[], Mapping[str, WorkerConnection]]  # returns the live connections, by worker
    processes: Callable[[], Iterable[Process]]  # returns the processes of the workers
    changed: Callable[[], None]  # called after a worker was found hung
    look_due: float = inf  # time of the next check; time after it is lag of this process's event loop
    hangs: int = 0  # number of hung workers found
    late_ticks: int = 0  # number of checks that were late
    _all_silent_since: float | None = None

    async def run(self) -> None:
        """Check all connections every `tick_s` seconds until cancelled."""
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
                await asyncio.sleep(policy.lag_s / 2)  # lets the event loop read the bytes that have arrived
                self._judge([connection for connection in suspects if not connection.readable()], loop.time())
            else:
                self._all_silent_since = None

    def _excuse(self, lag_s: float, now: float) -> None:
        """Subtract `lag_s` seconds from every worker's silence, because this process's event loop did not run."""
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
                return  # if all workers are silent at once, the cause is more likely in this process
        for connection, why in guilty:
            self.hangs += 1
            worker = next((name for name, one in connections.items() if one is connection), "?")
            log.warning("worker_hung", worker=worker, why=why, streams=connection.detector.open_streams)
            if connection.detector.silent_s(now) > policy.silence_s:
                # drops all hung workers before any stream is routed to another worker
                connection.drop("stalled", why)
        for connection, why in guilty:
            # if only the engine is stuck, the connection stays and beats show its progress
            connection.lose("stalled", why)
        self.changed()


LOOK_S = 0.25  # interval at which a waiting caller checks whether the link is still the wanted one

log = structlog.get_logger(__name__)


class Address(NamedTuple):
    """The address of one worker instance.

    `url` is `tcp://host:port`, or `nats:plane.WORKER.INSTANCE` through the broker. If `instance` is empty, any instance at the
    URL is accepted. Workers with the same `process` may share an event loop. An empty `process` means that the worker has its
    own process.
    """

    instance: str
    url: str
    process: str = ""

    @classmethod
    def of(cls, joined: WorkerJoined) -> "Address":
        """Return the address of a worker that has joined."""
        return cls(joined.instance, joined.url, f"{joined.topology.host}:{joined.pid}")

    @property
    def scheme(self) -> str:
        """The scheme of the URL, `tcp` or `nats`."""
        return self.url.partition(":")[0]


@dataclass(frozen=True, slots=True)
class PlaneLimits:
    """Deadlines and limits of the connections to workers."""

    connect_s: float = 1.0
    # long, because a process that starts 250 workers is late, and retries would delay it further
    welcome_s: float = 5.0
    backoff_s_min: float = 0.05
    backoff_s_max: float = 2.0
    ask_connect_s: float = 1.0  # how long a probe waits for a connection that is being reopened
    # how long a probe waits for a connection without a failed attempt, since a thousand workers may join at once
    ask_connect_first_s: float = 5.0
    ask_chunks_max: int = 4096
    # below the limit of open files, which the process needs for other purposes too
    connections_max: int = 65_536
    # maximum age of the last frame of a reported link; an idle worker sends a beat each second
    heard_s: float = 2.5
    # a worker that is silent for longer is chosen last; an idle worker sends a beat each second
    lately_s: float = 1.3
    # used instead of `lately_s` for a worker with open streams, which sends a frame every 0.1 s
    lately_busy_s: float = 0.25
    hang: HangPolicy = field(default_factory=HangPolicy)
    frames: TrafficLimit = FRAMES  # the traffic that a worker may send on its connection
    flood_pause_s: float = 30.0  # how long a worker that exceeded `frames` is not connected again


@dataclass(slots=True)
class WorkerLink:
    """The maintained connection to one worker instance, and the state of its reconnection attempts."""

    worker: str
    address: Address
    process: Process | None
    connection: WorkerConnection | None = None
    task: asyncio.Task[None] | None = None
    failures: int = 0  # number of failed attempts since the last connection
    why: str = ""  # reason of the last failed attempt; empty after a connection
    up: asyncio.Event = field(default_factory=asyncio.Event)  # set while the worker is connected

    @property
    def instance(self) -> str:
        connection = self.live
        return connection.instance if connection is not None else self.address.instance

    @property
    def live(self) -> WorkerConnection | None:
        return self.connection if self.connection is not None and self.connection.live else None


class WorkerLinks:
    """Maintains the connections of one process to workers."""

    def __init__(
        self, client: str, limits: PlaneLimits, dialers: Mapping[str, Dialer], key: FleetKey | None = None
    ) -> None:
        """Start without connections. This process identifies itself to workers as `client`.

        `dialers` maps URL schemes to dialers, in addition to the TCP dialer. `key` is the fleet key that workers must prove to
        know. If `key` is None, workers need not prove anything.
        """
        self.by_worker: dict[str, WorkerLink] = {}
        self._client = client
        self._limits = limits
        self._key = key
        self._processes: dict[str, Process] = {}
        self._dialers: dict[str, Dialer] = {"tcp": TcpDialer(), **dialers}
        self._group: asyncio.TaskGroup | None = None
        self.flooded: Callable[[str, str], None] = lambda worker, instance: None
        self._open = 0  # number of TCP connections, including attempts
        self._listeners: list[Callable[[], None]] = []
        self._notification: asyncio.Handle | None = None  # the pending notification of the listeners
        self.watch = HangWatch(limits.hang, self.standing, lambda: self._processes.values(), self._changed)

    async def run(self) -> None:
        """Maintain the connections to the workers that `set_workers` has set, until cancelled."""
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

    def set_workers(self, addresses: Mapping[str, Address]) -> None:
        """Set the workers to connect to, with their addresses. Connections to all other workers are closed."""
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
        """Update the known worker processes. `housed` maps each process to its number of workers."""
        now = asyncio.get_running_loop().time()
        del housed[""]
        self._processes = {name: self._processes.get(name) or Process(now) for name in housed}
        for name, process in self._processes.items():
            process.shared = housed[name] > 1

    def listen(self, changed: Callable[[], None]) -> None:
        """Call `changed` after each change of a connection (open, closed) or of its worker's state (draining, stuck)."""
        self._listeners.append(changed)

    @property
    def connected(self) -> dict[str, str]:
        """The instance of each worker with a live connection, by worker."""
        return {link.worker: link.instance for link in self.by_worker.values() if link.live is not None}

    @property
    def responsive(self) -> dict[str, str]:
        """The instance of each connected worker that has recently sent a frame, by worker.

        A frontend reports these workers to the controller as reachable. If a worker is connected but sends no frames, the worker
        is stopped, or the network drops its packets.
        """
        since = asyncio.get_running_loop().time() - self._limits.heard_s
        connections = ((link, link.live) for link in self.by_worker.values())
        return {
            k.worker: k.instance
            for k, connection in connections
            if connection is not None and connection.detector.heard_at >= since
        }

    @property
    def welcomes(self) -> dict[str, Welcome]:
        """The Welcome frame of each connected worker, by worker."""
        return {worker: connection.greeted.result() for worker, connection in self.standing().items()}

    @property
    def late_chunks(self) -> int:
        """Number of chunks that arrived for streams without a sink, over all live connections."""
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
        """Schedule one call of the listeners, so that a thousand workers that join at once do not cause a thousand calls."""
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
        """Wait until a worker is connected, and return its link.

        Raise WorkerUnreachable after `ask_connect_s` seconds, or after `ask_connect_first_s` seconds if no attempt to connect has
        failed yet.
        """
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
        """Count a TCP connection during the `with` block. Raise WorkerUnreachable if too many are open.

        Connections through the broker share one socket and do not count.
        """
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
        """Return the seconds until the next attempt to connect.

        The wait doubles with each failure, up to `backoff_s_max`. A factor from 0.5 to 1, by a hash of client,
        worker and number of failures, spreads the frontends' attempts over time.
        """
        limits = self._limits
        whole = min(limits.backoff_s_max, limits.backoff_s_min * 2 ** min(link.failures, 16))
        spread = xxhash.xxh32_intdigest(f"{self._client} {link.worker} {link.failures}".encode()) / 2**32
        return float(whole * (0.5 + spread / 2))
