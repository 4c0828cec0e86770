"""The connections of workers to their fleet: journal, bus, and channels of the request plane."""

import asyncio
import contextlib
from dataclasses import dataclass

import structlog

from events.journal.discarding import DiscardingJournal
from events.journal.nats import NatsJournal
from events.journal.port import JournalReports
from events.nats.bus import NatsBus
from events.nats.channels import Channels
from events.versions import Known
from workers.config.settings import WorkerSettings

BROKER_S = 0.5  # how long startup waits for the broker before continuing without it
FLUSH_S = 0.5
CLOSE_S = 1.5
NO_FLEET = "no fleet runs on this data directory and no broker is configured: only frontends that have its address can find it"

log = structlog.get_logger(__name__)


@dataclass
class FleetLinks:
    """The connections of a process or worker to the fleet: the journal, and the bus if a broker is configured."""

    journal: JournalReports
    bus: NatsBus | None
    channels: Channels | None = None  # channels of the request plane, if it runs through the broker
    shared: bool = False  # whether the bus uses the journal's connection

    async def close(self) -> None:
        """Flush the journal and close all connections. Facts that the broker does not accept in 0.5 s stay in the spool."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.journal.flush(FLUSH_S)
                if self.channels is not None:
                    await self.channels.close()
                if self.bus is not None and not self.shared:
                    await self.bus.close()
                await self.journal.close()


async def connect_fleet(settings: WorkerSettings, instance: str) -> FleetLinks:
    """Connect a process to the broker, or to no fleet if no broker is configured. `instance` is a part of the names."""
    role = "watch" if settings.watch_only else "worker"
    source = f"{role}:{settings.name}:{instance}"
    if not settings.nats_url:
        log.warning("worker_without_fleet", worker=settings.name, data=str(settings.data), why=NO_FLEET)
        return FleetLinks(DiscardingJournal(), None)
    spool = settings.data / "spool" / f"{role}-{settings.name}"
    journal, bus = await asyncio.gather(
        NatsJournal.connect(
            settings.nats_url,
            f"{role}:{settings.name}",
            spool,
            wait_s=BROKER_S,
            make=False,
            known=Known.ours(),
            workers=settings.names,
        ),
        NatsBus.connect(settings.nats_url, source, wait_s=BROKER_S, echo=False),
    )
    channels = None
    if settings.request_plane == "nats":
        channels = await Channels.open(settings.nats_url, f"plane:{source}", wait_s=BROKER_S)
    return FleetLinks(journal, bus, channels)


async def connect_worker(settings: WorkerSettings) -> FleetLinks:
    """Connect one of many workers of a process, over one connection with the worker's own broker account.

    Each of these workers has an account, because the account's name states which workers it may speak for, and the set of
    workers changes while the process runs.
    """
    if not settings.nats_url:
        return FleetLinks(DiscardingJournal(), None)
    name, spool = f"worker:{settings.name}", settings.data / "spool" / f"worker-{settings.name}"
    journal = await NatsJournal.connect(
        settings.nats_url,
        name,
        spool,
        wait_s=BROKER_S,
        make=False,
        known=Known.ours(),
        workers=(settings.name,),
    )
    channels = None
    if settings.request_plane == "nats":
        channels = await Channels.open(settings.nats_url, f"plane:{name}", wait_s=BROKER_S)
    return FleetLinks(journal, NatsBus(journal.connection), channels, shared=True)
