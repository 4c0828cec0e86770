"""A controller process: makes decisions while it holds the lease, and is a hot standby otherwise.

    lease ─▶ reconciler (decides)     journal ─▶ view ─┬─▶ canary loop ─▶ request plane
                                                       ├─▶ liveness ◀─ heartbeats
                                                       ├─▶ actuator ─▶ workers
                                                       └─▶ metrics, operator's control

The diagram shows the parts of the process and its connections, and an arrow points to the part that gets the data. Modules that
are slow to import and not needed for decisions (FastStream, tokenizers) are imported after the loops have started.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import aiohttp
import structlog
from aiohttp import web

from controller.adapters.clock import SystemClock
from controller.adapters.request_plane.client import ProbePlanes, RequestPlaneClient, cover_name
from controller.adapters.request_plane.dialers import Dialer, port_open
from controller.adapters.request_plane.hang import HangPolicy
from controller.adapters.request_plane.nats_dialer import dialers
from controller.adapters.request_plane.worker_links import Address, PlaneLimits
from controller.deciders.fleet import DECIDERS_VERSION
from controller.metrics import ControllerMetrics, FleetCollector
from controller.processes import collector
from controller.processes.controller_admin import serve, url_of
from controller.processes.observability import scrape_targets
from controller.runtime.actuator import Actuator
from controller.runtime.beats import Beats
from controller.runtime.canary.goldens import Vocabulary
from controller.runtime.canary.loop import CanaryLoop
from controller.runtime.canary.tools import ProberDependencies
from controller.runtime.commands import OperatorCommands
from controller.runtime.fleet_versions import FleetVersions
from controller.runtime.host_processes import Lingering
from controller.runtime.initial_fold import StoredHistory
from controller.runtime.intake import Intruders
from controller.runtime.lease import Lease
from controller.runtime.liveness import HangCheck, Liveness
from controller.runtime.operations import ControlOperations
from controller.runtime.reconciler import Reconciler
from controller.runtime.settings import ControllerSettings
from controller.runtime.snapshot_publisher import SnapshotKeeper
from controller.runtime.storage_usage import JournalRoom, describe
from controller.runtime.view import FleetView
from events.decisions import HealthChanged, WorkerForgotten
from events.fact import Recorded
from events.fleet_key import FleetKey
from events.journal.acknowledged import remembered
from events.journal.nats import NatsJournal
from events.json_types import JsonView
from events.nats.bus import NatsBus
from events.observations import WorkerJoined, WorkerLeft
from events.process import descriptors, presence
from events.process.stopping import stop_signal
from events.versions import Known

READY_S = 3600.0  # longest time that a starting controller waits for the broker
PROJECTOR_S = 0.8
CONNECT_S = 0.5
LINGER_S = 3.0
LEASE_KEY = "controller"
# facts that may change the set of connections, or of workers with metrics
MOVES = (WorkerJoined, WorkerLeft, HealthChanged, WorkerForgotten)
# 2 s of silence delay only a canary; how soon users' streams move depends on the limits of the frontends
PROBER = PlaneLimits(hang=HangPolicy(silence_s=2.0))

log = structlog.get_logger(__name__)


async def run_controller(
    settings: ControllerSettings,
    *,
    nats_url: str,
    database_url: str | None,
    data: Path,
    name: str,
    key: FleetKey | None = None,
) -> int:
    """Run a controller, as the leader or on standby, until SIGTERM. Return the exit code 0.

    Raise HoldfastError for an error that an operator must resolve.
    """
    stop = stop_signal()
    spool = data / "spool" / f"controller-{name}"
    async with asyncio.TaskGroup() as group:
        # if a process has seen a stream before, the stream must exist and is not created
        new = not remembered(data / "spool")
        connecting = group.create_task(
            NatsJournal.connect(
                nats_url,
                f"controller:{name}",
                spool,
                make=new,
                known=Known.ours(DECIDERS_VERSION),
                stops_at="decisions",
            )
        )
        calling = group.create_task(NatsBus.connect(nats_url, name))
        store = _store(database_url)
    journal, bus = connecting.result(), calling.result()
    broker = nats_url if settings.request_plane == "nats" else ""
    async with dialers(broker, f"controller:{name}") as known:
        controller = ControllerProcess(settings, journal, bus, store, data, known, key)
        try:
            await controller.run(stop, nats_url, name)
        finally:
            await bus.close()
            await journal.close()
            if store is not None:
                await store.close()
            await controller.close()
    return 0


def _store(url: str | None) -> Any:
    if not url:
        return None
    from controller.adapters.postgres.store import PostgresStore

    return PostgresStore(url)


async def load_vocabulary(tokenizer: str) -> Vocabulary:
    """Return the vocabulary of a worker's tokenizer, loaded in a thread. Raise TokenizerMissing if it cannot be found."""

    def load() -> Vocabulary:
        from controller.frontend.openai.text.tokenizer import ids_of, load_tokenizer

        loaded = load_tokenizer(tokenizer)
        return Vocabulary(lambda text: list(loaded.encode(text).ids), ids_of(loaded))

    return await asyncio.to_thread(load)


class ControllerProcess:
    """Composes and runs all services of one controller."""

    def __init__(
        self,
        settings: ControllerSettings,
        journal: NatsJournal,
        bus: NatsBus,
        store: StoredHistory | None,
        data: Path,
        dialers: Mapping[str, Dialer],
        key: FleetKey | None = None,
    ) -> None:
        clock = SystemClock()
        self._settings = settings
        self._journal = journal
        self._bus = bus
        self._store = store
        self._data = data
        self.view = FleetView(journal, store=store)
        self.lease = Lease(journal.cell(LEASE_KEY), journal.source, clock)
        self.beats = Beats(clock, settings.worker_budgets.beats)
        self.versions = FleetVersions(
            self.view, self.beats, bus, journal.consumer_names, clock, settings.versions, lambda: self.leading
        )
        self.reconciler = Reconciler(
            journal, self.lease, settings.policy, clock, store=store, force=self.versions.next_in_force
        )
        self.versions.wake = self.reconciler.wake
        covert = settings.canary.unmarked_every > 0
        limits = replace(PROBER, connections_max=descriptors.connections() // (1 + covert))
        self.plane = ProbePlanes(
            RequestPlaneClient("canary", limits, dialers, key),
            RequestPlaneClient(cover_name(), limits, dialers, key) if covert else None,
        )
        self.metrics = ControllerMetrics(settings.metrics_cardinality)
        self.canary = CanaryLoop(self.view, self._tools(clock), settings.canary)
        self.liveness = Liveness(
            self.view, self.beats, journal, bus, clock, settings.liveness, lambda: self.leading
        )
        self.intruders = Intruders(self.view, journal, clock, lambda: self.leading, settings.worker_budgets)
        self.beats.flooded = self.intruders.flooding
        self.lingering = Lingering(
            self.view, self.beats, journal, self.intruders.processes, port_open, clock, lambda: self.leading
        )
        self.commands = OperatorCommands(
            journal,
            clock,
            seq=lambda: self.view.seq,
            leading=lambda: self.leading,
            vacant=lambda: self.lease.vacant,
        )
        self.lease.report = self.intruders.foreign_lease
        self.view.listen(self._absorb)
        self.lease.listen(self._lease_changed)
        self._led_at = float("-inf")  # when this controller last led, by the event loop's clock
        self._runner: web.AppRunner | None = None
        self._stopping = False

    @property
    def leading(self) -> bool:
        """Whether this controller leads the fleet: it holds the lease and has read the journal to its end."""
        return self.lease.held and self.view.is_ready

    def _tools(self, clock: SystemClock) -> ProberDependencies:
        def running(worker: str) -> int:
            fleet = self.view.fleet
            known = fleet.workers.get(worker)
            beat = known and self.beats.lives.get((worker, known.joined.instance))
            return max(1, beat.load.get("running", 1)) if beat else 1

        return ProberDependencies(
            journal=self._journal,
            prober=self.plane,
            clock=clock,
            meter=self.metrics,
            vocabulary=load_vocabulary,
            leading=lambda: self.leading,
            running=running,
        )

    async def run(self, stop: asyncio.Event, nats_url: str, name: str) -> None:
        """Run all services until `stop` is set or one service fails."""
        room = JournalRoom(self._journal.usage, self._data, SystemClock())
        self.metrics.registry.register(
            FleetCollector(lambda: self.view.fleet, self.beats, lambda: {**self._own(), **room.known})
        )
        intake = self.intruders.intake
        await self.beats.start(self._bus)
        self._runner = await serve(
            self.metrics.render,
            self._report,
            self._settings.admin_host,
            self._settings.admin_port,
            [web.get(scrape_targets.PATH, self._targets)],
        )
        async with asyncio.TaskGroup() as group:
            services = [
                group.create_task(work, name=label)
                for label, work in (
                    ("lease", self.lease.run()),
                    ("reconciler", self.reconciler.run()),
                    ("view", self.view.run()),
                    ("plane", self.plane.run()),
                    ("canary", self.canary.run()),
                    ("liveness", self.liveness.run()),
                    ("hang_check", self._hang_check().run()),
                    ("actuator", self._actuator().run()),
                    ("versions", self.versions.run()),
                    ("lingering", self.lingering.run()),
                    ("snapshots", self._snapshots().run()),
                    ("room", room.run()),
                    ("control", self._control(nats_url)),
                    ("intake", intake.run(nats_url, name)),
                    ("links", self._keep_connected()),
                    ("ready", self._announce(self._runner, name)),
                )
            ]
            await stop.wait()
            self._stopping = True
            log.info("controller_stops")
            for service in services:
                service.cancel()

    async def _targets(self, request: web.Request) -> web.Response:
        """Return the scrape targets of this host to Prometheus."""
        found = await asyncio.to_thread(presence.present, self._data)
        return web.json_response(scrape_targets.target_groups(found))

    def _actuator(self) -> Actuator:
        settings, leads = self._settings.actuator, lambda: self.leading
        return Actuator(self.view, self.beats, self._bus, SystemClock(), settings, leads)

    def _hang_check(self) -> HangCheck:
        settings, leads = self._settings.liveness, lambda: self.leading
        return HangCheck(self.view, self.liveness, self.beats, self._bus, SystemClock(), settings, leads)

    def _snapshots(self) -> SnapshotKeeper:
        journal = self._settings.journal
        return SnapshotKeeper(
            self._journal,
            lambda: self.reconciler.order,
            lambda: self.leading and self.reconciler.leading,
            lambda: self._journal.usage(growth=False),
            journal.bounds(),
            SystemClock(),
        )

    async def close(self) -> None:
        """Close the admin port. It is closed last, so that the process answers /live until it ends."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _announce(self, runner: web.AppRunner, name: str) -> None:
        await self.view.ready(READY_S)
        self._lease_changed(self.lease.held)
        presence.announce(self._data, "controller", name, url_of(runner))
        collector.freeze_and_tune()
        log.info("controller_ready", seq=self.view.seq, leading=self.leading)

    async def _control(self, nats_url: str) -> None:
        await self.view.ready(READY_S)
        api_module = await asyncio.to_thread(import_module, "controller.adapters.control_api")
        operations = ControlOperations(
            fleet=lambda: self.view.fleet,
            leader=lambda: "" if self.lease.vacant else self.lease.leader,
            present=lambda: presence.present(self._data),
            projected=self._projected,
            stored=lambda: describe(self._journal.usage, self._data),
            journal=self._journal,
            bus=self._bus,
            beats=self.beats,
            injects_faults=self._settings.chaos,
            processes=self.intruders.processes,
            fleet_versions=self.versions,
        )
        try:
            await api_module.ControlApi(nats_url, operations, self.commands).run()
        finally:
            operations.close()

    # --- triggers of the loops ------------------------------------------------------------------------------

    def _lease_changed(self, held: bool) -> None:
        self._connect()
        self.canary.kick()

    def _absorb(self, view: FleetView, batch: Sequence[Recorded]) -> None:
        self.commands.record_outcomes(batch)
        if view.is_ready:
            self.metrics.count(batch)
        if not batch or any(isinstance(r.fact, MOVES) for r in batch):
            self.metrics.set_workers(view.fleet)
            self._connect()

    async def _keep_connected(self) -> None:
        """Call `_connect` every 0.5 s, because a change of the fleet or of the lease may have been missed."""
        while True:
            self._connect()
            await asyncio.sleep(CONNECT_S)

    def _connect(self) -> None:
        """Connect to every live worker while leading, and disconnect from all workers while not leading.

        The connections are kept for 3 s after the controller stopped leading, because it may regain the lease at once.
        """
        now = asyncio.get_running_loop().time()
        if self.leading:
            self._led_at = now
        elif now - self._led_at < LINGER_S:
            return
        workers = self.view.fleet.workers if self.leading else {}
        self.plane.set_workers({n: Address.of(w.joined) for n, w in workers.items() if w.alive})

    # --- reports --------------------------------------------------------------------------------------------

    def _own(self) -> Mapping[str, float | None]:
        written, decided = self._journal.counters, self.reconciler.counters
        return {
            "leader": float(self.lease.held),
            "lease_takeovers": self.lease.takeovers,
            "observer_blind": float(self.liveness.blind),
            "workers_lingering": self.lingering.count,
            "journal_position": self.view.seq,
            "decisions": decided.decisions,
            "settles": decided.settles,
            "settle_seconds": decided.settle_s,
            "appends": written.appends,
            "appends_fenced": written.appends_fenced,
            "appends_unknown": written.appends_unknown,
            "facts_observed": written.observed,
            "facts_acknowledged": written.acknowledged,
            "facts_retried": written.retried,
            "facts_dropped": written.dropped,
            "facts_withheld": written.withheld,
            "journal_skipped": written.skipped,
            "journal_unknown": written.unknown,
            "spool_depth": self._journal.spool_depth,
            "spool_bytes": self._journal.spool_bytes,
            "journal_reachable": self._journal.reachable,
            "broker_certificate_ends_timestamp_seconds": self._journal.certificate_ends,
        }

    async def _projected(self) -> int | None:
        """Return the journal position that a projector has reached.

        If a projector runs on this host, it reports the position itself. Otherwise the position is read from the state store.
        Return None without a store.
        """
        urls = [p.url for p in presence.present(self._data) if p.role == "projector" and p.url]
        timeout = aiohttp.ClientTimeout(total=PROJECTOR_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for url in urls:
                try:
                    async with session.get(f"{url}/health") as answer:
                        return int((await answer.json())["position"])
                except (aiohttp.ClientError, TimeoutError, KeyError, ValueError, TypeError):
                    continue
        return None if self._store is None else (await self._store.position()).seq

    def _ready(self) -> str:
        """Return why this controller is not ready. Return an empty string if it is ready."""
        if self._stopping:
            return "this controller is stopping"
        if self.view.fault is not None:
            return str(self.view.fault)
        if not self.view.is_ready:
            return "the journal has not been read to its end yet"
        return "" if self._journal.connected else "the broker cannot be reached"

    def _report(self) -> JsonView:
        """Return the body of /health and /ready as a JSON object."""
        why = self._ready()
        return {"ready": not why, "reason": why, "leading": self.leading, "position": self.view.seq}
