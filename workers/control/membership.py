"""Registers a worker, reports its adapters, sends its heartbeats, and checks that its name is free.

    engine.start … ── the engine waits ──▶ WorkerAwaited ── another reason, or two minutes ──▶ WorkerAwaited …

While the engine waits for its server or its model, the worker records WorkerAwaited facts. If the engine starts at once, the
worker records none.

A fleet accepts the newest instance of a name and retires the older one. A second worker with the name of a live worker would
therefore end that worker. To prevent this, a starting worker listens for heartbeats with its name until it registers, and exits
if it receives one. A check at the start alone would miss a worker of the same name that starts at the same time and registers
first.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime

import msgspec
import structlog

from events import subjects
from events.errors import HoldfastError
from events.journal.port import JournalReports
from events.nats.bus import Body, Bus, Subscription
from events.nats.connection import DISCONNECTED
from events.observations import AdaptersChanged, Topology, WorkerAwaited, WorkerJoined, WorkerLeft, canary_key
from workers.config.settings import WorkerConfig
from workers.engines.engine import Engine
from workers.migration.trust import CONVICTED
from workers.output import layout
from workers.server import WorkerServer

POLL_S = 0.1
# minimum time between facts with different reasons or adapters, so that a flapping server causes few facts
CHANGE_INTERVAL_S = 10.0
REPEAT_S = 120.0  # repetition interval of the same reason; the fleet forgets the worker after ten minutes without a fact
BEAT_S = 1.0
# the fields of an engine's identity that the canary key depends on
KIND = ("model", "revision", "tokenizer", "engine", "engine_version", "dtype", "tp", "device", "lineage")

log = structlog.get_logger(__name__)


def registration(
    config: WorkerConfig, engine: Engine, url: str, gpus: tuple[str, ...], *, kv_events: bool
) -> WorkerJoined:
    """Return the fact that registers a worker after its engine has started.

    The fact contains the URL for frontends, the engine's identity and speed profile, and the worker's topology.
    """
    identity = {one.name: getattr(engine.identity, one.name) for one in fields(engine.identity)}
    host = socket.gethostname()
    return WorkerJoined(
        worker=config.name,
        instance=config.instance,
        **identity,
        url=url,
        canary_key=canary_key(**{name: identity[name] for name in KIND}),
        pid=os.getpid(),
        topology=Topology(host=host, gpus=gpus, nvlink_domain=config.nvlink_domain, rail=config.rail),
        migration_limit=config.migration_limit,
        kv=layout(engine.kv),
        kv_events=kv_events,
        spare=config.spare,
        account=config.account,
    )


class WaitReport:
    """Records on the journal why a worker cannot join yet."""

    def __init__(self, config: WorkerConfig, engine: Engine, journal: JournalReports) -> None:
        self._about = {"worker": config.name, "instance": config.instance}
        self._engine = engine
        self._journal = journal
        self._reported: tuple[str, str] | None = None  # reason and model
        self._reported_at = float("-inf")  # in loop time

    @contextlib.asynccontextmanager
    async def reporting(self) -> AsyncIterator[None]:
        """Poll the engine and record what it waits for, until the end of the `with` block."""
        polling = asyncio.create_task(self._poll())
        try:
            yield
        finally:
            polling.cancel()
            await asyncio.wait((polling,))

    async def _poll(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self.look(loop.time())
            await asyncio.sleep(POLL_S)

    def look(self, now: float) -> None:
        """Record what the engine waits for, unless a record was made recently. `now` is the loop time in seconds.

        A new reason is recorded at the earliest CHANGE_INTERVAL_S (10) seconds after the last record. An unchanged reason is
        recorded again after REPEAT_S (120) seconds.
        """
        awaits = self._engine.awaits()
        if awaits is None:
            return
        due_s = REPEAT_S if self._reported == (awaits.reason, awaits.model) else CHANGE_INTERVAL_S
        if now - self._reported_at < due_s:
            return
        self._reported, self._reported_at = (awaits.reason, awaits.model), now
        self._journal.observe(WorkerAwaited(**self._about, reason=awaits.reason, model=awaits.model))

    def leave(self) -> None:
        """Record that this worker was stopped before it joined, so that the fleet no longer waits for the worker.

        If no WorkerAwaited fact was recorded, record nothing.
        """
        if self._reported is not None:
            self._journal.observe(WorkerLeft(**self._about, mode="graceful", exit=0))


class AdapterReport:
    """Records on the journal which LoRA adapters the engine has, after the registration and whenever they change."""

    def __init__(self, config: WorkerConfig, engine: Engine, journal: JournalReports) -> None:
        self._about = {"worker": config.name, "instance": config.instance}
        self._engine = engine
        self._journal = journal
        self._reported: tuple[str, ...] = ()
        self._reported_at = float("-inf")  # in loop time

    def registered(self, adapters: tuple[str, ...]) -> None:
        """Note the adapters of the worker's registration, so that only later changes are recorded."""
        self._reported = adapters

    def look(self, now: float) -> None:
        """Record the engine's adapters if they have changed. `now` is the loop time in seconds.

        Two records are at least CHANGE_INTERVAL_S (10) seconds apart.
        """
        adapters = self._engine.identity.adapters
        if adapters != self._reported and now - self._reported_at >= CHANGE_INTERVAL_S:
            self._reported, self._reported_at = adapters, now
            self._journal.observe(AdaptersChanged(**self._about, adapters=adapters))


class NameTaken(HoldfastError):
    """Another live worker of the fleet has this name."""


@dataclass(eq=False)
class NameCheck:
    """Checks that no other live worker has this worker's name. Without a broker, nothing is checked."""

    config: WorkerConfig
    bus: Bus | None
    journal: JournalReports
    _subscription: Subscription | None = None
    # set once a heartbeat of another worker with this name has arrived
    _heard: asyncio.Event = field(default_factory=asyncio.Event)
    _other: str = ""  # the instance of the other worker

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Listen for heartbeats of another worker with this name until the end of the `with` block.

        Raise NameTaken if a heartbeat arrives in the first `name_check_s` seconds. If one arrives later, `again` raises
        NameTaken.
        """
        try:
            await self._first_check()
            yield
        finally:
            subscription, self._subscription = self._subscription, None
            if subscription is not None:
                with contextlib.suppress(*DISCONNECTED):
                    await subscription.cancel()

    async def again(self) -> None:
        """Raise NameTaken if a heartbeat of another worker with this name has arrived so far.

        If the broker was not connected when `listening` began, first listen for `name_check_s` seconds.
        """
        if self._subscription is None:
            await self._first_check()
        elif self._heard.is_set():
            raise self._taken()

    async def _first_check(self) -> None:
        config, bus = self.config, self.bus
        if bus is None or bus.since is None or not config.name_check_s:
            return
        try:
            self._subscription = await bus.subscribe(subjects.beat(config.name), self._on_beat)
        except DISCONNECTED:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(config.name_check_s):
                await self._heard.wait()
            raise self._taken()

    def _on_beat(self, subject: str, body: Body) -> None:
        other = str(body.get("instance") or "")
        if other and other != self.config.instance:
            self._other = other
            self._heard.set()

    def _taken(self) -> NameTaken:
        name, other = self.config.name, self._other
        log.error("name_taken", worker=name, instance=self.config.instance, other=other)
        reason = f"another live worker is named {name} (instance {other})"
        self.journal.observe(
            WorkerAwaited(worker=name, instance=self.config.instance, reason=reason, name_taken_by=other)
        )
        return NameTaken(f"{reason}; it stays in service. Choose another --name, or stop that worker first.")


@dataclass(eq=False)
class FleetBeats:
    """Sends one worker's heartbeats to the fleet over the message bus. Without a bus, no heartbeats are sent."""

    config: WorkerConfig
    engine: Engine
    server: WorkerServer
    bus: Bus | None
    batch_share: float = 1.0  # the share of its batch that the worker may fill
    _sent: int = 0

    async def run(self) -> None:
        """Send a heartbeat every second until cancelled."""
        while True:
            await self.beat()
            await asyncio.sleep(BEAT_S)

    async def beat(self) -> None:
        """Send one heartbeat, unless an injected fault drops all traffic of the worker."""
        server = self.server
        if self.bus is None or server.connections.blackholed:
            return
        self._sent += 1
        trust = server.moves.trust
        body = {
            "worker": self.config.name,
            "instance": self.config.instance,
            "seq": self._sent,
            "load": msgspec.structs.asdict(self.engine.load()),
            "draining": server.drain.draining,
            "convicted": CONVICTED in trust.doubts,
            "batch": self.batch_share,
            "at": datetime.now(UTC).isoformat(),
        }
        await self.bus.publish(subjects.beat(self.config.name), body)
