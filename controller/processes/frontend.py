"""The frontend process: its fleet state, connections to workers, request dispatch and HTTP ports.

The process needs the broker and the database only at its start, to load the fleet's state. If they become unreachable later, it
serves requests by the fleet state in its memory, and spools its facts to a local file.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from controller.adapters.clock import SystemClock
from controller.adapters.feeds.kv_events import KvEvents
from controller.adapters.feeds.slot_sync import SlotSync
from controller.adapters.request_plane.client import RequestPlaneClient
from controller.adapters.request_plane.dialers import Dialer
from controller.adapters.request_plane.nats_dialer import dialers
from controller.adapters.request_plane.worker_links import Address, PlaneLimits
from controller.console.console import Console
from controller.console.endpoints import PATH
from controller.deciders.fleet import DECIDERS_VERSION
from controller.frontend.director import SERVED_EVERY_S, Director, ServedUntil, World
from controller.frontend.http.api import Api
from controller.frontend.http.credentials import check_open_port
from controller.frontend.http.listeners import Listeners
from controller.frontend.http.openai_endpoints import OpenAiEndpoints
from controller.frontend.settings import FrontendSettings, RouterSettings
from controller.metrics import JournalMetrics
from controller.ports import Observe
from controller.processes import collector
from controller.processes import last_served as served
from controller.processes.collector import HeapTrim
from controller.processes.operating import frontend_console
from controller.runtime.view import FleetView
from events import subjects
from events.codec import UnknownKind
from events.decisions import HealthChanged
from events.errors import HoldfastError
from events.fact import Observation, Recorded, Skipped
from events.fleet_key import FleetKey
from events.journal.port import JournalDropped
from events.nats.bus import Bus, NatsBus
from events.nats.connection import DISCONNECTED
from events.observations import Profile, WorkerJoined, WorkerLeft
from events.order import OutOfTurn
from events.process import descriptors, presence
from events.process.stopping import stop_signal
from events.versions import Known

TICK_S = 0.1
CHECK_S = 1.0  # interval of the checks for clients that do not read, and for unused memory
LINKS_S = 1.0
READY_S = 30.0
AGAIN_S = 5.0  # delay before retrying an event that this frontend cannot fold
PREPARE_S = 2.0  # longest wait before accepting requests, during which the host's other frontends get them
BROKER_S = 2.0  # longest wait for the broker at the start
STATIC_PROFILE = Profile(
    kv_blocks=1, block_tokens=16, max_batch=4096, prefill_tokens_per_s=1e6, tpot_ms=((1, 1.0),)
)

Service = Callable[[], Coroutine[object, object, None]]
"""Starts a service that runs as long as the frontend does."""

log = structlog.get_logger(__name__)


async def run_frontend(
    settings: FrontendSettings,
    *,
    nats_url: str,
    database_url: str | None,
    data: Path,
    name: str,
    key: FleetKey | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, then finish requests in flight within the grace period, and return the exit code 0.

    Raise HoldfastError if the frontend cannot start, because it gets no port or no space for its spool, or cannot read the
    journal.
    """
    check_open_port(settings)
    if settings.static:
        return await FrontendProcess(settings, name, data, key=key).run_static()
    broker = nats_url if settings.request_plane == "nats" else ""
    async with dialers(broker, f"frontend:{name}") as known:
        return await FrontendProcess(settings, name, data, known, key).run(nats_url, database_url)


@dataclass(frozen=True)
class RouterFeeds:
    """The broker connections of one frontend's router, as its settings require.

    One connection receives workers' KV events. The other exchanges counts of running requests with other frontends.
    """

    kv: KvEvents | None
    sync: SlotSync | None

    @classmethod
    async def open(
        cls, url: str, name: str, settings: RouterSettings, director: Director, wait_s: float = BROKER_S
    ) -> "RouterFeeds":
        """Return the feeds that the settings require.

        If a connection to the broker takes longer than `wait_s` seconds, it is established in the background.
        """
        scheduler, kv, sync = director.routing, None, None
        if settings.mode == "kv" and settings.kv_events:
            budget = director.settings.worker_budgets
            kv = await KvEvents.open(url, name, wait_s=wait_s, limit=budget.kv_events)
            scheduler.state.view = kv.view
            kv.view.claims.lost = director.intrusions.claims_lost
            kv.flooded = director.intrusions.claims_flooded_by
        if settings.replica_sync:
            sync = await SlotSync.open(url, name, scheduler.slots, director.peers.names, wait_s=wait_s)
        return cls(kv, sync)

    def services(self) -> list[Service]:
        """Return the functions that run the feeds until the frontend ends."""
        return [one.run for one in (self.kv, self.sync) if one is not None]

    def absorb(self, joined: Iterable[WorkerJoined]) -> None:
        """Pass the live workers to the feed of KV events. Do nothing if the router has no such feed."""
        if self.kv is not None:
            self.kv.absorb(joined)

    async def close(self) -> None:
        """Close the connections to the broker."""
        for one in (self.kv, self.sync):
            if one is not None:
                await one.close()


class FrontendProcess:
    """Composes and runs one frontend process."""

    def __init__(
        self,
        settings: FrontendSettings,
        name: str,
        data: Path,
        dialers: Mapping[str, Dialer] | None = None,
        key: FleetKey | None = None,
    ) -> None:
        self._settings = settings
        self._name = name
        self._data = data
        self._served_at = served.path_of(data, name)
        self._plane = RequestPlaneClient(
            name,
            PlaneLimits(
                connections_max=descriptors.connections(),
                frames=settings.worker_budgets.frames,
                flood_pause_s=settings.worker_budgets.flood_pause_s,
            ),
            dialers,
            key,
        )

    async def run(self, nats_url: str, database_url: str | None) -> int:
        """Serve the fleet that the journal describes until the process is stopped, and return the exit code 0."""
        from events.journal.nats import NatsJournal  # imported here, because a static frontend has no journal

        journal = await NatsJournal.connect(
            nats_url,
            f"frontend:{self._name}",
            self._data / "spool" / self._name,
            wait_s=BROKER_S,
            make=False,
            known=Known.ours(DECIDERS_VERSION),
            stops_at="nothing",
        )
        bus = await NatsBus.connect(nats_url, f"frontend:{self._name}", wait_s=BROKER_S)
        store = None
        if database_url:
            from controller.adapters.postgres.store import PostgresStore

            store = PostgresStore(database_url)
        director = self._director(journal.observe)
        measured = director.metrics.registry
        measured.register(JournalMetrics(journal))
        # if the broker is unreachable, do not wait for it a second time
        wait_s = BROKER_S if bus.since is not None else 0.0
        feeds = await RouterFeeds.open(nats_url, self._name, self._settings.router, director, wait_s)
        view = FleetView(journal, store=store)
        view.listen(lambda view, batch: self._absorb(director, feeds, view, batch))
        console = None
        if self._settings.console:
            history = frontend_console.history_reader(self._data, nats_url, database_url)
            ended = store.ended_incidents if store is not None else None
            acts_in = self._data if self._settings.console_actions else None
            console = frontend_console.make(
                self._name, view, journal, bus, self._plane, director, history, ended, acts_in
            )
        services: list[Service] = [
            lambda: self._follow(director, view),
            lambda: self._report_links(bus, director),
            lambda: self._remember(director, view),
            lambda: follow_peers(director, bus),
            *feeds.services(),
        ]
        if store is not None:
            from controller.runtime.projection.row_watch import RowWatch

            services.append(RowWatch(view, store).run)
        if console is not None:
            services.append(console.run)
        try:
            return await self._serve(director, services, console, bus)
        finally:
            await journal.close()
            await bus.close()
            await feeds.close()
            if store is not None:
                await store.close()

    async def run_static(self) -> int:
        """Serve the workers that the settings list, without a broker, a fleet or stored state. Return the exit code 0."""
        director = self._director(_discard)
        addresses = [address.strip() for address in self._settings.static.split(",") if address.strip()]
        self._plane.listen(lambda: director.set_static(self._welcomed()))
        self._plane.set_workers(
            {f"static-{n}": Address("", f"tcp://{address}") for n, address in enumerate(addresses)}
        )
        director.go_live()
        return await self._serve(director, ())

    def _welcomed(self) -> list[WorkerJoined]:
        tokenizer = self._settings.static_tokenizer
        return [
            static_worker(worker, welcome.instance, welcome.model, tokenizer)
            for worker, welcome in self._plane.welcomes.items()
        ]

    def _director(self, observe: Observe) -> Director:
        director = Director(World(self._name, self._plane, observe, SystemClock()), self._settings)
        self._plane.listen(director.changed)
        self._plane.flooded = director.intrusions.flooded_by
        return director

    # --- services -----------------------------------------------------------------------------------------

    async def _serve(
        self,
        director: Director,
        services: Sequence[Service],
        console: Console | None = None,
        bus: Bus | None = None,
    ) -> int:
        api = Api(director)
        responses = api.openai.responses
        listeners = Listeners(api, self._settings, console.before(api.admin) if console is not None else None)
        stop = stop_signal()
        try:
            await listeners.open()
            url = listeners.admin_url
            shown = f"{url}{PATH}" if console is not None else ""
            presence.announce(self._data, "frontend", self._name, url, console=shown)
            collector.freeze_and_tune()
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(service()) for service in (*services, self._plane.run)]
                running += [
                    group.create_task(self._tick(director)),
                    group.create_task(_check(api.openai, listeners)),
                ]
                running.append(group.create_task(self._accept(director, listeners, stop)))
                if bus is not None:
                    running.append(group.create_task(responses.serve(bus)))
                await stop.wait()
                await self.drain(api, listeners)
                for task in running:
                    task.cancel()
        finally:
            api.openai.cut_off()  # also runs if a service failed, so that clients get an error if possible
            director.report()
            await listeners.close()
        return 0

    async def _accept(self, director: Director, listeners: Listeners, stop: asyncio.Event) -> None:
        """Start to accept requests as soon as a worker can serve them, or the fleet is known to have no serving worker.

        Until then the other frontends on this host get the requests. If neither condition is met after PREPARE_S seconds, the
        frontend accepts requests anyway and answers them with an error, because it may be the only one on its host.
        """
        loop, monitor = asyncio.get_running_loop(), director.routing.monitor
        until = loop.time() + PREPARE_S
        while not monitor.servable and loop.time() < until:
            if director.live and not self._settings.static and not director.table.served:
                break
            await asyncio.sleep(TICK_S / 4)
        if stop.is_set():
            return
        await listeners.accept()
        log.info("frontend_serves", url=listeners.url, admin=listeners.admin_url)

    async def drain(self, api: Api, listeners: Listeners) -> None:
        """Stop accepting requests, and wait until those in flight finish. After the grace period, cut off the remaining ones."""
        api.openai.drain()
        await listeners.refuse()
        loop = asyncio.get_running_loop()
        until = loop.time() + self._settings.grace_s
        log.info("frontend_drains", requests=api.openai.answering, grace_s=self._settings.grace_s)
        while api.openai.answering and loop.time() < until:  # noqa: ASYNC110 (waited for only once, at shutdown)
            await asyncio.sleep(TICK_S / 2)
        api.openai.cut_off()
        await asyncio.sleep(0)

    async def _follow(self, director: Director, view: FleetView) -> None:
        """Follow the journal. If that is no longer possible, continue to serve by the last known state of the fleet.

        Raise HoldfastError if the journal cannot be followed at the start and no worker is known.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(_follow_persistently(view), name="view")
            try:
                await view.ready(READY_S)
            except HoldfastError as error:
                if view.fault is not None and not view.fleet.workers:
                    raise  # otherwise this frontend would answer every client that the model does not exist
                log.warning("fleet_not_known_in_time", why=str(error))
            director.go_live(await asyncio.to_thread(served.read, self._served_at))

    async def _remember(self, director: Director, view: FleetView) -> None:
        """Write the current time to a file at regular intervals while this frontend serves.

        The file tells the next frontend of the same name when its predecessor stopped serving.
        """
        clock = SystemClock()
        while True:
            await asyncio.sleep(SERVED_EVERY_S)
            if director.live:
                now = ServedUntil(clock.now(), view.seq)
                await asyncio.to_thread(served.write, self._served_at, now)

    def _absorb(
        self, director: Director, feeds: RouterFeeds, view: FleetView, batch: Sequence[Recorded]
    ) -> None:
        if not batch or any(isinstance(r.fact, WorkerJoined | WorkerLeft | HealthChanged) for r in batch):
            fleet = view.fleet
            workers = [worker for worker in fleet.workers.values() if worker.alive]
            self._plane.set_workers({w.joined.worker: Address.of(w.joined) for w in workers if w.joined.url})
            feeds.absorb([worker.joined for worker in workers])
        faults = director.metrics.faults
        faults.skipped.inc(sum(isinstance(r.fact, Skipped) for r in batch))
        director.absorb(view.fleet, batch)

    async def _report_links(self, bus: Bus, director: Director) -> None:
        """Report once a second how many requests wait in this frontend, and which workers it reaches.

        The controller does not declare a worker silent if a frontend reports that it reaches the worker.
        """
        clock = SystemClock()
        subject = subjects.links(self._name)
        while True:
            body = {
                "frontend": self._name,
                "at": clock.now().isoformat(),
                "workers": self._plane.responsive,
                "waiting": director.admission.waiting(),
            }
            await bus.publish(subject, body)
            await asyncio.sleep(LINKS_S)

    async def _tick(self, director: Director) -> None:
        faults = director.metrics.faults
        while True:
            await asyncio.sleep(TICK_S)
            director.tick()
            faults.hangs.set(self._plane.watch.hangs)
            faults.late_ticks.set(self._plane.watch.late_ticks)
            faults.late_chunks.set(self._plane.late_chunks)


async def _follow_persistently(view: FleetView, again_s: float = AGAIN_S) -> None:
    """Follow the journal. After an error that may be temporary, follow the journal again `again_s` seconds later.

    If this release cannot process an event, the event is read again until an operator has resolved the cause. If the journal
    has dropped the next events, the fleet's state is read from a snapshot. After any other error, log the error and return.
    """
    while True:
        try:
            await view.run()
        except (UnknownKind, OutOfTurn, JournalDropped):
            await asyncio.sleep(again_s)
        except HoldfastError as error:
            log.error("journal_not_followed", why=str(error))
            return


async def follow_peers(director: Director, bus: Bus) -> None:
    """Subscribe to the reports of the other frontends. If the broker is unreachable, retry until the subscription succeeds."""
    while True:
        try:
            await bus.subscribe(subjects.LINKS, director.peers.on_links)
            return
        except DISCONNECTED:
            await asyncio.sleep(LINKS_S)


async def _check(endpoints: OpenAiEndpoints, listeners: Listeners) -> None:
    loop, heap = asyncio.get_running_loop(), HeapTrim()
    while True:
        await asyncio.sleep(CHECK_S)
        endpoints.check(loop.time())
        listeners.check()
        await heap.look(loop.time())


def _discard(fact: Observation, *, traceparent: str = "") -> None:
    """Discard a fact, because a static frontend has no journal."""


def static_worker(worker: str, instance: str, model: str, tokenizer: str) -> WorkerJoined:
    """Return the registration of a worker that the settings of a static frontend list."""
    return WorkerJoined(
        worker=worker,
        instance=instance,
        url="",
        model=model,
        revision="static",
        tokenizer=tokenizer,
        engine="static",
        engine_version="",
        dtype="",
        tp=1,
        device="",
        profile=STATIC_PROFILE,
        canary_key="",
        pid=0,
        context_tokens=1 << 20,
    )
