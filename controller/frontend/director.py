"""The director: it holds what one frontend knows, follows the fold, and acts at once on what it sees there.

A convicted worker's answers move, a closed breaker clears what was held against the worker, a new worker gets the parked
ones. `routing` chooses workers; the request state machine, which `driver` feeds, decides what becomes of an answer.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from random import random

import structlog

from controller.deciders.fleet import Conviction, Fleet, Worker
from controller.frontend.admission.admission import Admission
from controller.frontend.admission.refusals import Refusals
from controller.frontend.dispatch.dispatcher import Dispatcher
from controller.frontend.dispatch.live_request import LiveRequest, RunningRequests
from controller.frontend.dispatch.placement import Placer
from controller.frontend.dispatch.preemption import Preemption
from controller.frontend.dispatch.reports import MigrationReports
from controller.frontend.dispatch.stall_watch import StallWatch
from controller.frontend.driver import Driver
from controller.frontend.health.exposure import MARGIN, Exposures
from controller.frontend.health.local_breakers import LocalBreakers, Panic
from controller.frontend.health.poison import PoisonWatch
from controller.frontend.metrics import FrontendMetrics
from controller.frontend.openai.text.model_folders import ModelFolders
from controller.frontend.planned_moves import PlannedMoves
from controller.frontend.request.events import Exposed, WorkerUnhealthy
from controller.frontend.request_metrics import RequestMetrics, gauge_model, gauge_worker
from controller.frontend.scheduling.scheduler import Peers, Scheduler
from controller.frontend.scheduling.traffic import TrafficReporter
from controller.frontend.settings import FrontendSettings
from controller.ports import Clock, Observe, RequestPlane
from controller.router.endpoints import Endpoint, EndpointTable, Key
from events.broker_users import account_of
from events.decisions import BreakerClosed, HealthStatus
from events.fact import Recorded
from events.intrusion.reports import Intrusions
from events.observations import (
    BusyThresholdsSet,
    ExposureUnknown,
    FrontendObservation,
    MoveRequested,
    RequestPoisonous,
    RequestSuspected,
    WorkerJoined,
)

log = structlog.get_logger(__name__)

BEGINNING_S = 10.0
EXPOSE_EVERY_S = 1.0  # how often the answers of a convicted worker that serves are reported
SERVED_EVERY_S = 1.0  # how often a frontend leaves behind until when it served


@dataclass(frozen=True, slots=True)
class World:
    """What a director is given of the world."""

    name: str  # this frontend's
    plane: RequestPlane
    observe: Observe
    clock: Clock
    dice: Callable[[], float] = random  # from 0 to below 1: choices that are drawn
    ended: Callable[[LiveRequest], object] | None = None  # called with each answer that is over


@dataclass(frozen=True, slots=True)
class Served:
    """Until when a frontend served, and how far it had read the journal then."""

    until: datetime
    seq: int

    def answers(self, conviction: Conviction) -> bool:
        """Whether that frontend has answered for it, or had nothing to answer for."""
        margin = MARGIN + timedelta(seconds=2 * SERVED_EVERY_S)
        return conviction.seq <= self.seq or conviction.since >= self.until + margin


@dataclass(eq=False, repr=False)
class Convictions:
    """Handles the conviction of a worker by a canary: reports every request that it has served since its last good canary, and
    applies the corruption policy to those that are running.

    The fold decides since when a life could be wrong (`Worker.convictions`). Each conviction is handled once, even if
    the worker was acquitted or restarted in the same batch of events.

    A frontend also handles convictions for its predecessor of the same name, which has stored until when it served and how
    far it had read. A worker convicted later, for a span in which the predecessor served, has served requests that are not
    known any more.
    """

    frontend: str
    clock: Clock
    observe: Observe
    driver: Driver
    metrics: RequestMetrics
    _exposed_at: dict[str, float] = field(
        default_factory=dict
    )  # by worker that serves although it is convicted
    _answered: dict[str, tuple[Conviction, ...]] = field(default_factory=dict)  # by worker

    def __post_init__(self) -> None:
        self._began = self.clock.now()
        self._exposures = self.driver.exposures

    def answer(self, worker: Worker) -> None:
        """Name every request that this worker has fed since, and deal with those that run."""
        for conviction in self._news(worker):
            self._convict(worker.joined.worker, conviction, self.clock.now())

    def expose(self, worker: Worker, now: float) -> None:
        """Name every request that a worker feeds which serves although it is convicted, once a second. Nothing is done about
        them: a header marks the answers."""
        name, instance = life = worker.joined.worker, worker.joined.instance
        if now < self._exposed_at.get(name, 0.0) + EXPOSE_EVERY_S:
            return
        self._exposed_at[name] = now
        since = [conviction.since for conviction in worker.convictions if conviction.instance == instance]
        if since:
            exposures, live = self._exposures, self.driver.live
            for unknown in exposures.unknown(life, since[-1], self.clock.now()):
                self._report(unknown)
            for one in exposures.fed(life, since[-1]):
                action = "continue" if one.span.live in live else "none"
                self._report(exposures.fact(one, action), one.span.traceparent)

    def answer_for_before(self, workers: Iterable[Worker], before: Served | None) -> None:
        """Report workers that were convicted before this frontend could act: which requests the frontend before it let them
        serve is not known any more. Where nothing is known of that one, only what stands now is answered for."""
        for worker in workers:
            for conviction in self._news(worker):
                self._answer_late(worker, conviction, before)

    def _answer_late(self, worker: Worker, conviction: Conviction, before: Served | None) -> None:
        name, instance = worker.joined.worker, worker.joined.instance
        if (
            conviction.at > self._began
        ):  # this frontend served already, while it still read what had been before
            self._convict(name, conviction, conviction.at)
            return
        stands = worker.alive and worker.health.corrupt and conviction.instance == instance
        if before.answers(conviction) if before is not None else not stands:
            return
        self._report(
            ExposureUnknown(
                frontend=self.frontend,
                worker=name,
                instance=conviction.instance,
                since=conviction.since,
                until=max(conviction.since, min(conviction.at, self._began)),
                why="it was convicted before this frontend had read the journal",
            )
        )

    def _news(self, worker: Worker) -> list[Conviction]:
        """Return the convictions of this worker that have not been answered for yet, and take them as answered for."""
        name = worker.joined.worker
        answered = self._answered.get(name, ())
        if worker.convictions == answered:
            return []
        known = {conviction.seq for conviction in answered}
        self._answered[name] = worker.convictions
        return [conviction for conviction in worker.convictions if conviction.seq not in known]

    def _convict(self, worker: str, conviction: Conviction, now: datetime) -> None:
        """Deal with every request exposed since the canary that failed was last sent and passed, then report them."""
        key: Key = (worker, conviction.instance)
        log.warning("worker_convicted", worker=worker, canary=conviction.canary)
        exposures, since = self._exposures, conviction.since
        unknown = exposures.unknown(key, since, now)
        # What is done about one choice of an answer may end the others: see first which have ended already.
        fed = [(one, self.driver.live.get(one.span.live)) for one in exposures.fed(key, since)]
        done = [
            "none" if live is None else "error" if live.over else self._expose(live, one.first, key)
            for one, live in fed
        ]
        for fact in unknown:
            self._report(fact)
        for (one, _), action in zip(fed, done, strict=True):
            self._report(exposures.fact(one, action), one.span.traceparent)

    def _expose(self, live: LiveRequest, first: int, key: Key) -> str:
        """Apply the corruption policy to a request whose tokens from index `first` on may be wrong. Return the action."""
        endpoint = live.endpoint
        stays = endpoint is not None and endpoint.key == key and bool(endpoint.suspect)
        exposed = Exposed(first, key, live.stats.depends_on(key), stays, live.progress)
        self.driver.feed(live, exposed)
        failed = live.exposure == "restart" and live.answer.error is not None
        return "error" if failed else live.exposure

    def _report(self, fact: FrontendObservation, trace: str = "") -> None:
        self.observe(fact, traceparent=trace)
        self.metrics.exposed(fact)


class WorkerIntrusions(Intrusions):
    """Reports workers that behave as no engine does: floods of frames, claims of lost KV blocks."""

    def __init__(self, table: EndpointTable, observe: Observe, clock: Clock) -> None:
        super().__init__(observe, clock.monotonic)
        self._table = table

    def flooded_by(self, worker: str, instance: str) -> None:
        """A worker has sent this frontend more than an engine can compute."""
        tried = "flood a frontend with frames"
        self.report(self._account(worker), tried, worker=worker, instance=instance, eject=True)

    def claims_flooded_by(self, worker: str) -> None:
        """A worker has published more KV events than an engine can have."""
        lives = self._lives(worker)
        tried, instance = "flood the frontends with KV events", lives[-1].instance if lives else ""
        self.report(self._account(worker), tried, worker=worker, instance=instance, eject=True)

    def claims_lost(self, life: Key, why: str) -> None:
        """A worker has lost its KV claims."""
        worker, instance = life
        self.report(self._account(worker), why, worker=worker, instance=instance)

    def _lives(self, worker: str) -> list[WorkerJoined]:
        return [one.joined for one in self._table.endpoints.values() if one.worker == worker]

    def _account(self, worker: str) -> str:
        """Return the broker account of the process in which a worker lives."""
        lives = self._lives(worker)
        return account_of(worker, lives[-1].account if lives else "")


class Director:
    """One frontend: what it knows of the fleet, and its live requests."""

    def __init__(self, world: World, settings: FrontendSettings) -> None:
        self.settings = settings
        self.now = now = world.clock.monotonic  # uvloop's own time stands still within a turn, and counts ms
        self._live_at: float | None = None  # until the fold has caught up, what it shows is history
        self._world = world
        self.table = table = EndpointTable(ModelFolders(settings.folders, world.observe).allows)
        self.metrics = FrontendMetrics()
        self.request_metrics = RequestMetrics(self.metrics)
        self.breakers = LocalBreakers(
            world.name, settings.breaker, settings.facts, world.observe, now, world.plane
        )
        self.exposures = Exposures(world.name, settings.facts.exposure_entries_max, world.clock)
        self.peers = Peers(now, world.name)
        panic = Panic(
            world.name,
            settings.breaker.panic_share,
            self.breakers,
            world.plane,
            world.observe,
            self.metrics.faults.panic,
        )
        self.routing = Scheduler(
            settings, table, world.plane, self.request_metrics, self.peers, panic, now, world.dice
        )
        self.running = RunningRequests()
        self.traffic = TrafficReporter(world.name, world.observe, world.clock, table, self.request_metrics)
        reports = MigrationReports(world.name, world.observe, self.request_metrics)
        self.preemption = preemption = Preemption(
            table, self.routing, self.running, reports, now, settings.parks_s
        )
        self.refusals = Refusals(world.name, settings, table, self.routing, self.traffic, world.dice)
        self.admission = Admission(
            settings, table, self.routing, self.refusals, self.request_metrics, preemption, self.routing.pools
        )
        self.placer = Placer(world.name, settings.moving, self.routing, world.plane, self.running, self.peers)
        self.poison = PoisonWatch(world.name, settings.poison, self.breakers, world.plane, world.observe)
        self.intrusions = WorkerIntrusions(table, world.observe, world.clock)
        self.driver = self._driver(world, reports)
        self.planned_moves = PlannedMoves(
            settings.moving, table, self.routing, world.plane, self.placer, self.running, self.driver
        )
        self._convictions = Convictions(
            world.name, world.clock, world.observe, self.driver, self.request_metrics
        )

    def _driver(self, world: World, reports: MigrationReports) -> Driver:
        """Return the owner of this frontend's live requests."""
        settings, table, running, metrics = self.settings, self.table, self.running, self.request_metrics
        dispatcher = Dispatcher(
            table=table,
            routing=self.routing,
            state=self.routing.state,
            plane=world.plane,
            poison=self.poison,
            breakers=self.breakers,
            running=running,
            metrics=metrics,
            intrusions=self.intrusions,
        )
        return Driver(
            settings=settings,
            table=table,
            routing=self.routing,
            admission=self.admission,
            dispatcher=dispatcher,
            preemption=self.preemption,
            placer=self.placer,
            poison=self.poison,
            exposures=self.exposures,
            reports=reports,
            stalls=StallWatch(settings.stall, settings.admission, table, running, world.plane, self.now()),
            request_metrics=metrics,
            faults=self.metrics.faults,
            tracker=self.routing.slots if settings.router.track_output_blocks else None,
            now=self.now,
            ended=world.ended,
        )

    # --- the fold -----------------------------------------------------------------------------------------

    @property
    def live(self) -> bool:
        """Whether the fold has caught up: see `go_live`."""
        return self._live_at is not None

    @property
    def beginning(self) -> bool:
        """Whether it does not know yet which models there are. In a fleet that has only begun, no worker may have registered."""
        unknown = not self.table.known and not self.table.unnamed
        return self._live_at is None or (unknown and self.now() - self._live_at < BEGINNING_S)

    def absorb(self, fleet: Fleet, batch: Sequence[Recorded]) -> None:
        """Take in what the fold shows after a batch of events, and act on it."""
        clock, ours = self._world.clock, self._world.name if self.live else None
        for recorded in batch:
            fact = recorded.fact
            if isinstance(fact, BreakerClosed):
                self.breakers.reset((fact.worker, fact.instance))
            elif isinstance(fact, RequestSuspected | RequestPoisonous) and fact.frontend != ours:
                self.poison.heard(fact, (clock.now() - recorded.at).total_seconds())
        change = self.table.absorb(fleet)
        if self.live:
            for recorded in batch:
                if isinstance(recorded.fact, MoveRequested) and not recorded.fact.late(recorded.at):
                    self.planned_moves.requested(recorded.fact)
        for endpoint, worker in change.updated:
            if self.live:
                self._convictions.answer(worker)
            if worker.passes:
                self.exposures.passed(endpoint.key, min(worker.passes.values()))
        if change.left:
            keys = set(self.table.endpoints)
            self.breakers.keep(keys)
            self.exposures.keep(keys)
            self.routing.forget(keys)
            self.admission.forget()
        if change:
            self.changed()

    def go_live(self, before: Served | None = None) -> None:
        """The fold has caught up: act on what it shows from now on, and report what was missed. `before`: until when the
        last frontend of this name served, where that is known."""
        self._live_at = self.now()
        self.routing.live = True
        self._convictions.answer_for_before(self.table.workers, before)
        self.changed()

    def set_static(self, joined: Sequence[WorkerJoined]) -> None:
        """Serve with workers that were given directly."""
        self.table.set_static(joined)
        self.routing.forget(set(self.table.endpoints))
        self.changed()

    def changed(self) -> None:
        """The table or a connection changed: move the requests that must move, and let waiting ones try."""
        self.routing.look_for_panic()
        for endpoint in list(self.table.endpoints.values()):
            out = endpoint.corrupt or endpoint.status is HealthStatus.UNHEALTHY
            if out and not endpoint.suspect and self.running.at(endpoint):
                self._empty(endpoint)
        if self.live:
            self.planned_moves.look()
        self.driver.wake()
        self.admission.wake()

    def _empty(self, endpoint: Endpoint) -> None:
        """Reroute what runs on a worker out of service. Its possible targets are looked up once, not per stream."""
        there = list(self.running.at(endpoint))
        others = {other.key for other in self.routing.targets(there[0].request)} - {endpoint.key}
        for live in there:
            gone = WorkerUnhealthy(endpoint.corrupt, others, live.progress)
            self.driver.feed(live, gone)

    def set_thresholds(self, fact: BusyThresholdsSet) -> None:
        """Apply the thresholds from which a model's workers are busy, and publish them: all frontends apply them then."""
        self.table.set_thresholds(fact)
        self._world.observe(replace(fact, frontend=self._world.name))

    # --- time ---------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Do what is due: breakers, deadlines, reports. Called ten times a second."""
        service = [endpoint.key for endpoint in self.table.endpoints.values() if endpoint.routable]
        self._pass_trials()
        self.breakers.tick(service)
        self.planned_moves.tick()
        state = self.routing.state
        state.expire()
        self.peers.names()  # forgets frontends that are silent, and what waits there
        self.metrics.settle()
        self.driver.tick()
        self.traffic.tick()
        self._expose_suspects()
        if self.refusals.tick(self.now()):
            self.routing.look_for_panic()
        if self.driver.waiting.parked:
            self.changed()
        else:
            self.admission.wake()  # another frontend's requests may have ended

    def _expose_suspects(self) -> None:
        """Report what workers feed that serve although canaries convict them."""
        for endpoint in self.table.endpoints.values():
            worker = self.table.worker(endpoint) if endpoint.suspect and endpoint.corrupt else None
            if worker is not None:
                self._convictions.expose(worker, self.now())

    def _pass_trials(self) -> None:
        """An answer may be longer than a trial: one whose tokens come when the time is over has passed it."""
        for key in self.breakers.trials_ending():
            endpoint = self.table.endpoints.get(key)
            for live in self.running.at(endpoint) if endpoint is not None else ():
                if live.dispatch is not None and live.state.has_output:
                    self.breakers.unjudged(key, live.dispatch.breaker_epoch, has_output=True)

    def report(self) -> None:
        """Publish what has not been reported yet, at the process's end."""
        self.breakers.report()
        self.refusals.report()
        self.traffic.stop()

    def render_metrics(self) -> bytes:
        """Return the metrics as they stand now."""
        self.request_metrics.settle()
        faults = self.metrics.faults
        faults.parked.set(len(self.driver.waiting.parked))
        faults.put_off.set(len(self.preemption.put_off))
        for model in self.table.known:
            endpoints = self.table.models.get(model, ())
            gauge_model(
                self.metrics, model, endpoints, self.routing.limit(model), self.admission.queued(model)
            )
        plane, scheduler = self._world.plane, self.routing
        positions = self.breakers.positions()
        for endpoint in self.table.endpoints.values():
            position, loads = positions.get(endpoint.key, "closed"), plane.load_by_rank(endpoint.worker)
            gauge_worker(self.metrics, endpoint, position, loads, scheduler.monitor.unread_by_rank(endpoint))
        self.metrics.keep({endpoint.worker for endpoint in self.table.endpoints.values()}, self.table.known)
        self.request_metrics.settle_kv(scheduler.state.view, scheduler.state.guessed)
        return self.metrics.render()
