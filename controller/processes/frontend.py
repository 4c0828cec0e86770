"""The frontend as a process: the fold, the request plane, the desk and the doors, and how they end.

It needs the broker and the database only to begin with what they know. Without either it goes on serving by
the fold that it holds; facts are spooled.
"""

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from controller.adapters.clock import SystemClock
from controller.adapters.nats_way import NatsWay
from controller.adapters.request_plane import Address, PlaneLimits, RequestPlane
from controller.frontend.api import Api
from controller.frontend.convictions import SERVED_EVERY_S, Served
from controller.frontend.desk import Desk, World
from controller.frontend.errors import unavailable
from controller.frontend.neighbours import Neighbours
from controller.frontend.server import Doors
from controller.frontend.settings import FrontendSettings
from controller.ports import Observe
from controller.processes import collector, served
from controller.processes.hearing import Hearing, Service
from events import descriptors, presence, subjects
from events.decisions import HealthChanged
from events.errors import HoldfastError
from events.fact import Observation, Recorded
from events.observations import Profile, WorkerJoined, WorkerLeft

if TYPE_CHECKING:
    from controller.runtime.view import FleetView
    from events.bus import Bus

TICK_S = 0.1
CHECK_S = 1.0  # clients that do not read
LINKS_S = 1.0
READY_S = 30.0
PREPARE_S = 2.0  # while other frontends get what comes
BROKER_S = 2.0
STATIC_PROFILE = Profile(
    kv_blocks=1, block_tokens=16, max_batch=4096, prefill_tokens_per_s=1e6, tpot_ms=((1, 1.0),)
)

log = structlog.get_logger(__name__)


async def run_frontend(
    settings: FrontendSettings, *, nats_url: str, database_url: str | None, data: Path, name: str
) -> int:
    """Serve until SIGTERM or SIGINT; then finish what is in flight, within the grace, and return 0."""
    if settings.static:
        return await Frontend(settings, name, data).run_static()
    return await Frontend(settings, name, data).run(nats_url, database_url)


class Frontend:
    """One frontend process, composed."""

    def __init__(self, settings: FrontendSettings, name: str, data: Path) -> None:
        self._settings = settings
        self._name = name
        self._data = data
        self._served_at = served.path_of(data, name)
        self._plane = RequestPlane(name, PlaneLimits(connections_max=descriptors.connections()))
        self._stop = asyncio.Event()

    async def run(self, nats_url: str, database_url: str | None) -> int:
        """Serve the fleet that the journal tells of."""
        from controller.runtime.view import FleetView
        from events.bus import NatsBus
        from events.journal.nats import NatsJournal

        journal = await NatsJournal.connect(
            nats_url, f"frontend:{self._name}", self._data / "spool" / self._name, wait_s=BROKER_S
        )
        bus = await NatsBus.connect(nats_url, f"frontend:{self._name}", wait_s=BROKER_S)
        way = None
        if self._settings.request_plane == "nats":
            way = await NatsWay.open(nats_url, f"frontend:{self._name}", wait_s=BROKER_S)
            self._plane.reach(subjects.PLANE_SCHEME, way)
        store = None
        if database_url:
            from controller.adapters.postgres import PostgresStore

            store = PostgresStore(database_url)
        desk = self._desk(journal.observe)
        hearing = Hearing()
        there = bus.since is not None  # the broker; who is not is not waited for once more
        await hearing.open(nats_url, self._name, self._settings.router, desk, BROKER_S if there else 0.0)
        view = FleetView(journal, store=store)
        view.listen(lambda view, batch: self._absorb(desk, hearing, view, batch))
        services: list[Service] = [
            lambda: self._follow(desk, view),
            lambda: self._report_links(bus),
            lambda: self._remember(desk, view),
            lambda: hear_neighbours(desk, bus),
            *hearing.services(),
        ]
        if store is not None:
            from controller.runtime.row_watch import RowWatch

            services.append(RowWatch(view, store).run)
        try:
            return await self._serve(desk, services)
        finally:
            await journal.close()
            await bus.close()
            await hearing.close()
            if way is not None:
                await way.close()
            if store is not None:
                await store.close()

    async def run_static(self) -> int:
        """Serve with the workers that the settings name: no broker, no fleet, nothing remembered."""
        desk = self._desk(_say_nothing)
        places = [place.strip() for place in self._settings.static.split(",") if place.strip()]
        self._plane.listen(lambda: desk.set_static(self._welcomed()))
        self._plane.want({f"static-{n}": Address("", f"tcp://{place}") for n, place in enumerate(places)})
        desk.live = True
        return await self._serve(desk, ())

    def _welcomed(self) -> list[WorkerJoined]:
        tokenizer = self._settings.static_tokenizer
        return [
            static_worker(worker, welcome.instance, welcome.model, tokenizer)
            for worker, welcome in self._plane.welcomes.items()
        ]

    def _desk(self, observe: Observe) -> Desk:
        desk = Desk(World(self._name, self._plane, observe, SystemClock()), self._settings)
        self._plane.listen(desk.changed)
        return desk

    # --- services -----------------------------------------------------------------------------------------

    async def _serve(self, desk: Desk, services: Sequence[Service]) -> int:
        api = Api(desk)
        doors = Doors(api, self._settings)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        try:
            await doors.open()
            presence.announce(self._data, "frontend", self._name, doors.admin_url)
            collector.calm()
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(service()) for service in (*services, self._plane.run)]
                running += [group.create_task(self._tick(desk)), group.create_task(_check(api))]
                running.append(group.create_task(self._let_in(desk, doors)))
                await self._stop.wait()
                await self._drain(api, doors)
                for task in running:
                    task.cancel()
        finally:
            desk.report()
            await doors.close()
        return 0

    async def _let_in(self, desk: Desk, doors: Doors) -> None:
        """Take requests as soon as one could be served, or the fleet is known to have nobody who serves. Until then the host's
        other frontends get them; but who is told nothing may be the only one, and says so itself after a moment."""
        loop, routing = asyncio.get_running_loop(), desk.routing
        until = loop.time() + PREPARE_S
        while not routing.servable and loop.time() < until:
            if desk.live and not self._settings.static and not routing.served:
                break
            await asyncio.sleep(TICK_S / 4)
        if self._stop.is_set():
            return
        await doors.let_in()
        log.info("frontend_serves", url=doors.url, admin=doors.admin_url)

    async def _drain(self, api: Api, doors: Doors) -> None:
        """Take no new requests, let those in flight end, and cut off what is left after the grace."""
        api.draining = True
        api.desk.admission.open = False
        await doors.shut()
        loop = asyncio.get_running_loop()
        until = loop.time() + self._settings.grace_s
        log.info("frontend_drains", requests=api.answering, grace_s=self._settings.grace_s)
        while api.answering and loop.time() < until:  # noqa: ASYNC110 (its end is awaited once, at the very end)
            await asyncio.sleep(TICK_S / 2)
        for exchange in list(api.exchanges):
            exchange.fail(unavailable("this frontend is shutting down", "draining", 1))
        api.desk.admission.send_away()
        await asyncio.sleep(0)

    async def _follow(self, desk: Desk, view: "FleetView") -> None:
        """Follow the journal; when it cannot be trusted any more, go on by what is known."""
        async with asyncio.TaskGroup() as group:
            group.create_task(_hold_on(view), name="view")
            try:
                await view.ready(READY_S)
            except HoldfastError as error:
                if view.fault is not None and not view.fleet.workers:
                    raise  # it would tell every client that his model does not exist
                log.warning("fleet_not_known_in_time", why=str(error))
            desk.go_live(await asyncio.to_thread(served.read, self._served_at))

    async def _remember(self, desk: Desk, view: "FleetView") -> None:
        """Leave behind until when this frontend served: the next one of this name answers for it."""
        clock = SystemClock()
        while True:
            await asyncio.sleep(SERVED_EVERY_S)
            if desk.live:
                now = Served(clock.now(), view.seq)
                await asyncio.to_thread(served.write, self._served_at, now)

    def _absorb(self, desk: Desk, hearing: Hearing, view: "FleetView", batch: Sequence[Recorded]) -> None:
        if not batch or any(isinstance(r.fact, WorkerJoined | WorkerLeft | HealthChanged) for r in batch):
            workers = [worker for worker in view.fleet.workers.values() if worker.alive]
            self._plane.want({w.joined.worker: Address.of(w.joined) for w in workers if w.joined.url})
            hearing.absorb([worker.joined for worker in workers])
        desk.absorb(view.fleet, batch)

    async def _report_links(self, bus: "Bus") -> None:
        """Say each second which workers we hear: a live connection vetoes a silence."""
        clock = SystemClock()
        subject = subjects.links(self._name)
        while True:
            body = {"frontend": self._name, "at": clock.now().isoformat(), "workers": self._plane.heard}
            await bus.publish(subject, body)
            await asyncio.sleep(LINKS_S)

    async def _tick(self, desk: Desk) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            desk.tick()
            desk.metrics.hangs.set(self._plane.watch.hangs)
            desk.metrics.late_ticks.set(self._plane.watch.late_ticks)
            desk.metrics.late_chunks.set(self._plane.late_chunks)


async def _hold_on(view: "FleetView") -> None:
    try:
        await view.run()
    except HoldfastError as error:
        log.error("journal_not_followed", why=str(error))


async def hear_neighbours(desk: Desk, bus: "Bus") -> None:
    """Hear which other frontends serve, now or as soon as there is a broker to hear them from."""
    from events.connection import DISCONNECTED

    neighbours = Neighbours(desk.now)
    desk.departures.frontends = desk.routing.neighbours = neighbours.names
    while True:
        try:
            await bus.subscribe(subjects.LINKS, neighbours.on_links)
            return
        except DISCONNECTED:
            await asyncio.sleep(LINKS_S)


async def _check(api: Api) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(CHECK_S)
        api.check(loop.time())


def _say_nothing(fact: Observation, *, traceparent: str = "") -> None:
    """There is no journal."""


def static_worker(worker: str, instance: str, model: str, tokenizer: str) -> WorkerJoined:
    """Return the registration of a worker that was given directly."""
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
