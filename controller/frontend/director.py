"""The director of a frontend: holds its view of the fleet, follows the fold and reacts to changes.

The director moves the answers of a convicted worker, resets a local breaker when the fleet's breaker closes, and
offers parked requests to a new worker. `routing` chooses workers. The request state machine, which `driver` feeds,
decides what happens to an answer.
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
from controller.frontend.driver import Driver
from controller.frontend.health.exposure import MARGIN, ServedSpans
from controller.frontend.health.local_breakers import LocalBreakers, Panic
from controller.frontend.health.poison import PoisonWatch
from controller.frontend.metrics import FrontendMetrics
from controller.frontend.openai.text.tokenizer import ModelFolders
from controller.frontend.planned_moves import PlannedMoves
from controller.frontend.request.events import Exposed, WorkerUnhealthy
from controller.frontend.request_metrics import RequestMetrics, gauge_model, gauge_worker
from controller.frontend.scheduling.scheduler import Peers, Scheduler
from controller.frontend.scheduling.traffic import TrafficReporter
from controller.frontend.settings import FrontendSettings
from controller.ports import Clock, Observe, RequestPlane
from controller.router.endpoints import Endpoint, EndpointTable, Key
from events import observations as facts
from events.broker_users import account_of
from events.decisions import BreakerClosed, HealthStatus
from events.fact import Recorded
from events.intrusion.reports import Intrusions

log = structlog.get_logger(__name__)

# seconds after the fold has caught up in which an empty set of models counts as still unknown
BEGINNING_S = 10.0
EXPOSE_EVERY_S = 1.0  # seconds between two reports of the answers of a convicted worker that keeps serving
SERVED_EVERY_S = 1.0  # seconds between two records of the time until which this frontend has served


@dataclass(frozen=True, slots=True)
class World:
    """The dependencies of a director: its frontend's name, request plane, fact publisher, clock and random source."""

    name: str  # of this frontend
    plane: RequestPlane
    observe: Observe
    clock: Clock
    dice: Callable[[], float] = random  # random numbers in [0, 1) for random choices
    ended: Callable[[LiveRequest], object] | None = None  # called with each answer that has ended


@dataclass(frozen=True, slots=True)
class ServedUntil:
    """The time until which the previous frontend of this name served, and the journal position that it had read."""

    until: datetime
    seq: int

    def answers(self, conviction: Conviction) -> bool:
        """Whether the previous frontend handled the conviction, or sent the worker no request in the convicted period."""
        margin = MARGIN + timedelta(seconds=2 * SERVED_EVERY_S)
        return conviction.seq <= self.seq or conviction.since >= self.until + margin


@dataclass(eq=False, repr=False)
class Convictions:
    """Handles the conviction of a worker by a canary.

    When a worker is convicted, every request that it has served since its last good canary is reported. The
    corruption policy is applied to the requests that still run.

    The fold decides the time from which an instance may have computed wrongly (`Worker.convictions`). Each conviction
    is handled once, even if the worker was acquitted or restarted before this frontend read the conviction.

    A frontend also handles convictions for the previous frontend of the same name, which stored the time until which
    it served and the position that it had read. If a worker is convicted later for a period in which the previous
    frontend served, the requests of that period are unknown, and `ExposureUnknown` is reported.
    """

    frontend: str
    clock: Clock
    observe: Observe
    driver: Driver
    metrics: RequestMetrics
    # time of the last report, by name of a worker that serves although it is convicted
    _exposed_at: dict[str, float] = field(default_factory=dict)
    # convictions that were handled, by worker name
    _answered: dict[str, tuple[Conviction, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began = self.clock.now()
        self._exposures = self.driver.exposures

    def answer(self, worker: Worker) -> None:
        """For each new conviction of this worker, apply the corruption policy to the exposed requests and report them."""
        for conviction in self._news(worker):
            self._convict(worker.joined.worker, conviction, self.clock.now())

    def expose(self, worker: Worker, now: float) -> None:
        """Report the requests that a convicted worker serves while it stays in service, at most once per EXPOSE_EVERY_S.

        The answers to these requests are not changed. A response header marks them.
        """
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

    def answer_for_before(self, workers: Iterable[Worker], before: ServedUntil | None) -> None:
        """Report `ExposureUnknown` for workers that were convicted before this frontend had read the journal.

        The requests that these workers served through the previous frontend are unknown. `before` describes that
        frontend. If it is None, only convictions of living workers that are still in force are reported.
        """
        for worker in workers:
            for conviction in self._news(worker):
                self._answer_late(worker, conviction, before)

    def _answer_late(self, worker: Worker, conviction: Conviction, before: ServedUntil | None) -> None:
        name, instance = worker.joined.worker, worker.joined.instance
        if (
            conviction.at > self._began
        ):  # this frontend already served while it was still reading older events
            self._convict(name, conviction, conviction.at)
            return
        stands = worker.alive and worker.health.corrupt and conviction.instance == instance
        if before.answers(conviction) if before is not None else not stands:
            return
        self._report(
            facts.ExposureUnknown(
                frontend=self.frontend,
                worker=name,
                instance=conviction.instance,
                since=conviction.since,
                until=max(conviction.since, min(conviction.at, self._began)),
                why="it was convicted before this frontend had read the journal",
            )
        )

    def _news(self, worker: Worker) -> list[Conviction]:
        """Return this worker's convictions that were not handled yet, and mark them as handled."""
        name = worker.joined.worker
        answered = self._answered.get(name, ())
        if worker.convictions == answered:
            return []
        known = {conviction.seq for conviction in answered}
        self._answered[name] = worker.convictions
        return [conviction for conviction in worker.convictions if conviction.seq not in known]

    def _convict(self, worker: str, conviction: Conviction, now: datetime) -> None:
        """Apply the corruption policy to every request with tokens from the time of doubt on, then report each one.

        The time of doubt (`conviction.since`) begins when the failed canary last passed on this instance.
        """
        key: Key = (worker, conviction.instance)
        log.warning("worker_convicted", worker=worker, canary=conviction.canary)
        exposures, since = self._exposures, conviction.since
        unknown = exposures.unknown(key, since, now)
        # Acting on one choice of an answer may end the other choices, so look up first which have already ended.
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
        """Apply the corruption policy to a running request if its tokens from index `first` on may be wrong.

        Return the action taken.
        """
        endpoint = live.endpoint
        stays = endpoint is not None and endpoint.key == key and bool(endpoint.suspect)
        exposed = Exposed(first, key, live.stats.depends_on(key), stays, live.progress)
        self.driver.feed(live, exposed)
        failed = live.exposure == "restart" and live.answer.error is not None
        return "error" if failed else live.exposure

    def _report(self, fact: facts.FrontendObservation, trace: str = "") -> None:
        self.observe(fact, traceparent=trace)
        self.metrics.exposed(fact)


class WorkerIntrusions(Intrusions):
    """Reports workers that behave as no engine does: they flood a frontend with frames or KV events, or lose KV events."""

    def __init__(self, table: EndpointTable, observe: Observe, clock: Clock) -> None:
        super().__init__(observe, clock.monotonic)
        self._table = table

    def flooded_by(self, worker: str, instance: str) -> None:
        """Report a worker that has sent this frontend more frames than an engine can compute, so that it is ejected."""
        tried = "flood a frontend with frames"
        self.report(self._account(worker), tried, worker=worker, instance=instance, eject=True)

    def claims_flooded_by(self, worker: str) -> None:
        """Report a worker that has published more KV events than an engine can produce, so that it is ejected."""
        lives = self._lives(worker)
        tried, instance = "flood the frontends with KV events", lives[-1].instance if lives else ""
        self.report(self._account(worker), tried, worker=worker, instance=instance, eject=True)

    def claims_lost(self, life: Key, why: str) -> None:
        """Report a worker, without ejecting it, after its KV events had to be dropped. `why` describes the reason."""
        worker, instance = life
        self.report(self._account(worker), why, worker=worker, instance=instance)

    def _lives(self, worker: str) -> list[facts.WorkerJoined]:
        return [one.joined for one in self._table.endpoints.values() if one.worker == worker]

    def _account(self, worker: str) -> str:
        """Return the broker account of the worker's process."""
        lives = self._lives(worker)
        return account_of(worker, lives[-1].account if lives else "")


class Director:
    """Builds the components of one frontend, applies the fold to them, and runs their periodic work."""

    def __init__(self, world: World, settings: FrontendSettings) -> None:
        self.settings, self._world = settings, world
        name, plane, observe, clock = world.name, world.plane, world.observe, world.clock
        # not the loop's time: uvloop freezes that within a turn and rounds it to ms
        self.now = now = clock.monotonic
        # time at which the fold caught up; None before that, while the fold still shows the past
        self._live_at: float | None = None
        self.table = table = EndpointTable(ModelFolders(settings.folders, observe).allows)
        self.metrics = FrontendMetrics()
        self.request_metrics = metrics = RequestMetrics(self.metrics)
        self.running = running = RunningRequests()
        self.breakers = breakers = LocalBreakers(name, settings.breaker, settings.facts, observe, now, plane)
        self.exposures = exposures = ServedSpans(name, settings.facts.exposure_entries_max, clock)
        self.peers = Peers(now, name)
        faults, panic_share = self.metrics.faults, settings.breaker.panic_share
        panic = Panic(name, panic_share, breakers, plane, observe, faults.panic)
        self.routing = routing = Scheduler(
            settings, table, plane, metrics, self.peers, panic, now, world.dice
        )
        self.traffic = TrafficReporter(name, observe, clock, table, metrics)
        reports = MigrationReports(name, observe, metrics)
        self.preemption = preemption = Preemption(table, routing, running, reports, now, settings.parks_s)
        self.refusals = Refusals(name, settings, table, routing, self.traffic, world.dice)
        self.admission = admission = Admission(settings, table, routing, self.refusals, metrics, preemption)
        self.placer = placer = Placer(name, settings.moving, routing, plane, running, self.peers)
        self.poison = poison = PoisonWatch(name, settings.poison, breakers, plane, observe)
        self.intrusions = WorkerIntrusions(table, observe, clock)
        dispatcher = Dispatcher(table, routing, plane, poison, breakers, running, metrics, self.intrusions)
        self.driver = driver = Driver(
            settings, admission, dispatcher, preemption, placer, exposures, reports, faults, now, world.ended
        )
        self.planned_moves = PlannedMoves(placer, driver)
        self._convictions = Convictions(name, clock, observe, driver, metrics)

    # --- the fold -----------------------------------------------------------------------------------------

    @property
    def live(self) -> bool:
        """Whether the fold has caught up with the journal, so that this frontend reacts to changes."""
        return self._live_at is not None

    @property
    def beginning(self) -> bool:
        """Whether it is too early to say which models exist: in a new fleet, no worker may have registered yet."""
        unknown = not self.table.known and not self.table.unnamed
        return self._live_at is None or (unknown and self.now() - self._live_at < BEGINNING_S)

    def absorb(self, fleet: Fleet, batch: Sequence[Recorded]) -> None:
        """Apply the state of the fold after these events to this frontend, and react to what has changed."""
        clock, ours = self._world.clock, self._world.name if self.live else None
        for recorded in batch:
            fact = recorded.fact
            if isinstance(fact, BreakerClosed):
                self.breakers.reset((fact.worker, fact.instance))
            elif isinstance(fact, facts.RequestSuspected | facts.RequestPoisonous) and fact.frontend != ours:
                self.poison.heard(fact, (clock.now() - recorded.at).total_seconds())
        change = self.table.absorb(fleet)
        if self.live:
            for recorded in batch:
                if isinstance(recorded.fact, facts.MoveRequested) and not recorded.fact.late(recorded.at):
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

    def go_live(self, before: ServedUntil | None = None) -> None:
        """React to all later changes of the fold, because it has caught up. Report convictions that happened before.

        `before` is the time until which the previous frontend of this name served, or None if unknown.
        """
        self._live_at = self.now()
        self.routing.live = True
        self._convictions.answer_for_before(self.table.workers, before)
        self.changed()

    def set_static(self, joined: Sequence[facts.WorkerJoined]) -> None:
        """Serve with a fixed list of workers from the configuration, instead of the workers of the journal."""
        self.table.set_static(joined)
        self.routing.forget(set(self.table.endpoints))
        self.changed()

    def changed(self) -> None:
        """React to a change of the endpoint table or of a connection: move requests off failed workers, and retry
        waiting requests.
        """
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
        """Reroute the requests of a worker that is out of service.

        The possible targets are looked up once for all requests.
        """
        there = list(self.running.at(endpoint))
        others = {other.key for other in self.routing.targets(there[0].request)} - {endpoint.key}
        for live in there:
            gone = WorkerUnhealthy(endpoint.corrupt, others, live.progress)
            self.driver.feed(live, gone)

    def set_thresholds(self, fact: facts.BusyThresholdsSet) -> None:
        """Apply new thresholds above which a model's workers count as busy, and publish them so that all frontends apply
        them.
        """
        self.table.set_thresholds(fact)
        self._world.observe(replace(fact, frontend=self._world.name))

    # --- time ---------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Run periodic work: breakers, deadlines, reports. Called ten times a second."""
        service = [endpoint.key for endpoint in self.table.endpoints.values() if endpoint.routable]
        self._pass_trials()
        self.breakers.tick(service)
        self.planned_moves.tick()
        state = self.routing.state
        state.expire()
        self.peers.names()  # removes silent frontends and the requests that wait there
        self.metrics.settle()
        self.driver.tick()
        self.traffic.tick()
        for endpoint in self.table.endpoints.values():
            worker = self.table.worker(endpoint) if endpoint.suspect and endpoint.corrupt else None
            if worker is not None:
                self._convictions.expose(worker, self.now())
        if self.refusals.tick(self.now()):
            self.routing.look_for_panic()
        if self.driver.waiting.parked:
            self.changed()
        else:
            self.admission.wake()  # requests of another frontend may have ended

    def _pass_trials(self) -> None:
        """Let a breaker's trial pass at its deadline if its request has output, because an answer may take longer than
        the trial.
        """
        for key in self.breakers.trials_ending():
            endpoint = self.table.endpoints.get(key)
            for live in self.running.at(endpoint) if endpoint is not None else ():
                if live.dispatch is not None and live.state.has_output:
                    self.breakers.unjudged(key, live.dispatch.breaker_epoch, has_output=True)

    def report(self) -> None:
        """Publish all pending reports, before the process ends."""
        self.breakers.report()
        self.refusals.report()
        self.traffic.stop()

    def render_metrics(self) -> bytes:
        """Return the current metrics in the Prometheus exposition format."""
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
