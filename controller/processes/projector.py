"""The projector process: composes journal, state store, projector and a small admin port."""

import asyncio
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry, generate_latest

from controller.adapters.postgres import migrate
from controller.adapters.postgres.store import PostgresStore
from controller.deciders.fleet import DECIDERS_VERSION
from controller.ports import StoreLost, StoreUnavailable
from controller.processes import collector
from controller.processes.controller_admin import serve, url_of
from controller.read_model.errors import StoreForbidden
from controller.runtime.projection.projector import Projector, ProjectorMetrics
from controller.runtime.settings import ProjectorSettings
from events.errors import HoldfastError
from events.journal.nats import NatsJournal
from events.journal.port import Journal, JournalUnavailable
from events.process import presence
from events.process.stopping import run_until, stop_signal
from events.versions import Known

WATCH_S = 1.0
ASK_S = 2.0
RETRY_S = 0.5
log = structlog.get_logger()


async def run_projector(
    settings: ProjectorSettings, *, nats_url: str, database_url: str | None, data: Path, name: str
) -> int:
    """Project until SIGTERM, and return the exit code 0. Raise HoldfastError, with the reason, if an operator must act."""
    if not database_url:
        raise HoldfastError("the projector needs a database: set HOLDFAST_DATABASE_URL")
    await _migrated(database_url)
    journal = await NatsJournal.connect(
        nats_url, f"projector:{name}", data / "spool" / name, make=False, known=Known.ours(DECIDERS_VERSION)
    )
    store = PostgresStore(database_url, snapshot_every=settings.snapshot_every)
    metrics = ProjectorMetrics(CollectorRegistry())
    projector = Projector(journal, store, written=metrics.written)
    watch = ProjectorWatch(projector, journal, metrics, settings.ready_lag)
    runner = await serve(
        watch.render, watch.report, settings.admin_host, settings.admin_port, probes=("/health", "/ready")
    )
    try:
        presence.announce(data, "projector", name, url_of(runner))
        collector.freeze_and_tune()
        await run_until(stop_signal(), projector.run(), watch.run())
        return 0
    finally:
        await runner.cleanup()
        await store.close()
        await journal.close()


async def _migrated(url: str) -> None:
    """Migrate the database to this release. While the database is unreachable, retry, and log each new reason once.

    Raise StoreLost if the tables are missing. Only the owner can create them again, because the projector's account may only
    write rows.
    """
    logged = ""
    while True:
        try:
            return await migrate.upgrade(url)
        except StoreForbidden as error:
            raise StoreLost(f"{error} If its tables existed before: {StoreLost.__doc__}") from error
        except StoreUnavailable as error:
            if str(error) != logged:
                log.warning("projector_waits", reason=(logged := str(error)))
            await asyncio.sleep(RETRY_S)


class ProjectorWatch:
    """Measures how many events the projector is behind the journal, and reports this over HTTP."""

    def __init__(
        self, projector: Projector, journal: Journal, metrics: ProjectorMetrics, ready_lag: int
    ) -> None:
        self._projector, self._journal, self._metrics = projector, journal, metrics
        self._ready_lag = ready_lag
        self._restarts = self._skipped = 0
        self.lag: int | None = None  # None: the journal does not answer

    async def run(self) -> None:
        """Measure every second, until cancelled."""
        while True:
            progress = self._projector.progress
            try:
                async with asyncio.timeout(ASK_S):
                    last = await self._journal.last_seq()
                self.lag = max(0, last - progress.projected)
                self._metrics.lag.set(self.lag)
            except (JournalUnavailable, TimeoutError):
                self.lag = None
            self._metrics.position.set(progress.projected)
            self._metrics.restarts.inc(progress.restarts - self._restarts)
            self._restarts = progress.restarts
            skipped = self._journal.counters.skipped
            self._metrics.skipped.inc(skipped - self._skipped)
            self._skipped = skipped
            await asyncio.sleep(WATCH_S)

    def ready(self) -> str:
        """Return why the projector is not ready, or an empty string if it is."""
        if not self._projector.progress.connected:
            return "the state store or the journal cannot be reached"
        if self.lag is None:
            return "the journal does not answer"
        return f"{self.lag} events behind" if self.lag > self._ready_lag else ""

    def report(self) -> dict[str, object]:
        """Return the body of /ready and /health as a JSON object."""
        progress = self._projector.progress
        why = self.ready()
        return {"ready": not why, "reason": why, "position": progress.projected, "lag": self.lag}

    def render(self) -> bytes:
        """Return the projector's metrics in the Prometheus text format."""
        return generate_latest(self._metrics.registry)
