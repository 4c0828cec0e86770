"""A worker's membership of the fleet: waiting, joining, heartbeats and the check of its name.

    engine.start … ── it waits for something ──▶ WorkerAwaited ── another reason, or two minutes ──▶ WorkerAwaited …

An engine that starts at once causes no such fact.

A fleet accepts the newest instance of a name and retires the older one, so a second worker of the same name would end the
first. The second worker therefore listens for heartbeats of the first from its start until it registers, and exits if it
receives one. It listens that long because a third worker may have started at the same time and registered first.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec
import structlog

from events import subjects
from events.errors import HoldfastError
from events.journal.port import Journal
from events.nats.bus import Body, Bus, Subscription
from events.nats.connection import DISCONNECTED
from events.observations import Topology, WorkerAwaited, WorkerJoined, WorkerLeft, canary_key
from workers.config.settings import WorkerConfig
from workers.engines.engine import Engine
from workers.migration.trust import CONVICTED
from workers.output import layout
from workers.server import WorkerServer

POLL_S = 0.1
CHANGE_INTERVAL_S = 10.0  # between two reasons, so that a flapping reason causes only a few facts a minute
REPEAT_S = 120.0  # repetition interval: a worker is no longer awaited after ten minutes without a fact
BEAT_S = 1.0
# fields of an engine's identity: what the canary key depends on, and what else the registration contains
KIND = ("model", "revision", "tokenizer", "engine", "engine_version", "dtype", "tp", "device", "lineage")
DESCRIBED = (
    "profile",
    "context_tokens",
    "exact",
    "root",
    "also_served",
    "generation_config",
    "dp",
    "waiting_max",
    "server",
)

log = structlog.get_logger(__name__)


def registration(
    config: WorkerConfig, engine: Engine, url: str, gpus: tuple[str, ...], *, kv_events: bool
) -> WorkerJoined:
    """Return the fact that registers a worker after its engine has started.

    It contains where frontends reach the worker, what it serves and how fast, and its topology.
    """
    kind = {name: getattr(engine.identity, name) for name in KIND}
    more = {name: getattr(engine.identity, name) for name in DESCRIBED}
    host = socket.gethostname()
    return WorkerJoined(
        worker=config.name,
        instance=config.instance,
        **kind,
        **more,
        url=url,
        canary_key=canary_key(**kind),
        pid=os.getpid(),
        topology=Topology(host=host, gpus=gpus, nvlink_domain=config.nvlink_domain, rail=config.rail),
        migration_limit=config.migration_limit,
        kv=layout(engine.kv),
        kv_events=kv_events,
        spare=config.spare,
        account=config.account,
    )


class WaitReport:
    """Records what a worker waits for until it joins."""

    def __init__(self, config: WorkerConfig, engine: Engine, journal: Journal) -> None:
        self._about = {"worker": config.name, "instance": config.instance}
        self._engine = engine
        self._journal = journal
        self._reported: tuple[str, str] | None = None  # reason and model
        self._reported_at = float("-inf")  # in loop time

    @contextlib.asynccontextmanager
    async def reporting(self) -> AsyncIterator[None]:
        """Record what the engine waits for, during the block."""
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
        """Record what the engine waits for, if that is due. `now`: seconds of any monotonic clock."""
        awaits = self._engine.awaits()
        if awaits is None:
            return
        due_s = REPEAT_S if self._reported == (awaits.reason, awaits.model) else CHANGE_INTERVAL_S
        if now - self._reported_at < due_s:
            return
        self._reported, self._reported_at = (awaits.reason, awaits.model), now
        self._journal.observe(WorkerAwaited(**self._about, reason=awaits.reason, model=awaits.model))

    def leave(self) -> None:
        """Record that the worker is no longer awaited, because it was stopped."""
        if self._reported is not None:
            self._journal.observe(WorkerLeft(**self._about, mode="graceful", exit=0))


class NameTaken(HoldfastError):
    """Another live worker of the fleet has this name."""


@dataclass(eq=False)
class NameCheck:
    """One worker's check of its own name. Without a broker nothing is checked."""

    config: WorkerConfig
    bus: Bus | None
    journal: Journal
    _subscription: Subscription | None = None
    _heard: asyncio.Event = field(
        default_factory=asyncio.Event
    )  # a flag: another worker has sent a heartbeat
    _other: str = ""  # its instance

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Listen for `name_check_s` and during the block. Raise NameTaken if another worker of this name is alive."""
        try:
            await self._first_check()
            yield
        finally:
            subscription, self._subscription = self._subscription, None
            if subscription is not None:
                with contextlib.suppress(*DISCONNECTED):
                    await subscription.cancel()

    async def again(self) -> None:
        """Check again with all heartbeats received so far. Raise NameTaken. If the broker was disconnected before, listen
        first."""
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
    """Sends one worker's heartbeats. Without a bus there are none."""

    config: WorkerConfig
    engine: Engine
    server: WorkerServer
    bus: Bus | None
    batch_share: float = 1.0  # the share of its batch that the worker may fill
    _sent: int = 0

    async def run(self) -> None:
        """Send heartbeats forever."""
        while True:
            await self.beat()
            await asyncio.sleep(BEAT_S)

    async def beat(self) -> None:
        """Send one heartbeat, unless a rehearsal blocks it."""
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
