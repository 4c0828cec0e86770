"""The director of a frontend: keeps its view of the fleet current, and reacts to changes.

The view is the fleet state folded from the journal: each event of the journal is applied to the state in turn. The
director moves the answers of a convicted worker, and retries parked (waiting) requests when a worker joins. It
resets a local breaker when the fleet's breaker closes. The scheduler chooses workers. The request state machine,
which `driver` feeds, decides what happens to an answer.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from random import random

import structlog

from controller.deciders.fleet import Conviction, Fleet, Worker
from controller.deciders.thresholds import BusyThresholds
from controller.frontend.admission.admission import Admission
from controller.frontend.admission.refusals import Refusals
from controller.frontend.dispatch.dispatcher import Dispatcher
from controller.frontend.dispatch.live_request import LiveRequest, RunningRequests
from controller.frontend.dispatch.placement import Placer
from controller.frontend.dispatch.preemption import Preemption
from controller.frontend.dispatch.reports import MigrationReports
from controller.frontend.driver import Driver
from controller.frontend.health.exposure import MARGIN, ServedSpans
from controller.frontend.health.local_breakers import LocalBreakers
from controller.frontend.health.poison import PoisonWatch
from controller.frontend.metrics import FrontendMetrics
from controller.frontend.openai.text.tokenizer import ModelFolders
from controller.frontend.planned_moves import PlannedMoves
from controller.frontend.request.events import Exposed, WorkerUnhealthy
from controller.frontend.request_metrics import RequestMetrics
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


@dataclass(frozen=True, slots=True)
class ServedUntil:
    """The time until which this frontend's previous process served, and the journal position that it had reached."""

    until: datetime
    seq: int

    def answers(self, conviction: Conviction) -> bool:
        """Return whether this frontend can ignore the conviction of a worker.

        It can if the previous process of this frontend handled the conviction, or sent the worker no request in the
        convicted period.
        """
        margin = MARGIN + timedelta(seconds=2 * SERVED_EVERY_S)
        return conviction.seq <= self.seq or conviction.since >= self.until + margin


@dataclass(eq=False, repr=False)
class Convictions:
    """Handles the conviction of a worker by a canary.

    When a worker is convicted, every request that it has served since its last good canary is reported. The corruption
    policy is applied to the requests that still run.

    `Worker.convictions` contains the time from which an instance may have computed wrongly. Each conviction is handled
    once, even if the worker was acquitted or restarted before this frontend read the conviction from the journal.

    The previous process of this frontend stored the time until which it served, and the journal position that it had
    reached. If a worker is convicted later for a period in which that process served, the requests of that period are
    unknown. This process then reports `ExposureUnknown`.
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
        """Handle each new conviction of this worker.

        Apply the corruption policy to the requests that may have received wrong tokens, and report these requests.
        """
        for conviction in self._news(worker):
            self._convict(worker.joined.worker, conviction, self.clock.now())

    def expose(self, worker: Worker, now: float) -> None:
        """Report, at most once per EXPOSE_EVERY_S, the requests that a convicted worker in service has served.

        The answers to these requests are not changed, but a response header marks them.
        """
        name, instance = key = worker.joined.worker, worker.joined.instance
        if now < self._exposed_at.get(name, 0.0) + EXPOSE_EVERY_S:
            return
        self._exposed_at[name] = now
        since = [conviction.since for conviction in worker.convictions if conviction.instance == instance]
        if since:
            self._report_exposed(key, since[-1], self.clock.now(), lambda live, first: "continue")

    def answer_for_before(self, workers: Iterable[Worker], before: ServedUntil | None) -> None:
        """Report `ExposureUnknown` for workers that were convicted before this frontend had read the journal.

        The requests that these workers served through the previous process of this frontend are unknown. `before`
        describes that process. If `before` is None, a conviction is reported only if it is still in force and its
        worker is alive. A conviction after the start of this process is handled as usual.
        """
        for worker in workers:
            for conviction in self._news(worker):
                self._answer_late(worker, conviction, before)

    def _answer_late(self, worker: Worker, conviction: Conviction, before: ServedUntil | None) -> None:
        name, instance = worker.joined.worker, worker.joined.instance
        # this frontend already served while it was still reading older events
        if conviction.at > self._began:
            self._convict(name, conviction, conviction.at)
            return
        stands = worker.alive and worker.health.corrupt and conviction.instance == instance
        if before.answers(conviction) if before is not None else not stands:
            return
        fact = facts.ExposureUnknown(
            frontend=self.frontend,
            worker=name,
            instance=conviction.instance,
            since=conviction.since,
            until=max(conviction.since, min(conviction.at, self._began)),
            why="it was convicted before this frontend had read the journal",
        )
        self.observe(fact)

    def _news(self, worker: Worker) -> list[Conviction]:
        """Return this worker's convictions that this frontend has not handled yet, and mark them as handled."""
        name = worker.joined.worker
        answered = self._answered.get(name, ())
        if worker.convictions == answered:
            return []
        known = {conviction.seq for conviction in answered}
        self._answered[name] = worker.convictions
        return [conviction for conviction in worker.convictions if conviction.seq not in known]

    def _convict(self, worker: str, conviction: Conviction, now: datetime) -> None:
        """Apply the corruption policy to every request with tokens from the convicted period, then report each request.

        The period starts at `conviction.since`. At that time, this worker instance last passed the canary (a test
        request) that it has now failed.
        """
        key: Key = (worker, conviction.instance)
        log.warning("worker_convicted", worker=worker, canary=conviction.canary)

        def act(live: LiveRequest, first: int) -> str:
            return "error" if live.over else self._expose(live, first, key)

        self._report_exposed(key, conviction.since, now, act)

    def _report_exposed(
        self, key: Key, since: datetime, now: datetime, act: Callable[[LiveRequest, int], str]
    ) -> None:
        """Report each request with tokens that a worker has sent since `since`, and the periods without records.

        If a request still runs, `act` is called before the report, with the request and the index of its first exposed
        token. `act` returns the action taken.
        """
        exposures = self._exposures
        unknown = exposures.unknown(key, since, now)
        # Acting on one choice of an answer may end the other choices, so look up first which have already ended.
        fed = [(one, self.driver.live.get(one.span.live)) for one in exposures.tokens_sent(key, since)]
        done = ["none" if live is None else act(live, one.first) for one, live in fed]
        for fact in unknown:
            self.observe(fact)
        for (one, _), action in zip(fed, done, strict=True):
            self.observe(exposures.fact(one, action), traceparent=one.span.traceparent)
            self.metrics.exposed(action)

    def _expose(self, live: LiveRequest, first: int, key: Key) -> str:
        """Apply the corruption policy to a running request, because its tokens from index `first` on may be wrong.

        Return the action taken.
        """
        endpoint = live.endpoint
        stays = endpoint is not None and endpoint.key == key and bool(endpoint.suspect)
        exposed = Exposed(first, key, live.stats.depends_on(key), stays, live.progress)
        self.driver.feed(live, exposed)
        failed = live.exposure == "restart" and live.answer.error is not None
        return "error" if failed else live.exposure


class WorkerIntrusions(Intrusions):
    """Reports workers that send what no engine would send.

    Such workers flood a frontend with frames or KV events, or claim cached KV blocks that do not exist.
    """

    def __init__(self, table: EndpointTable, observe: Observe, clock: Clock) -> None:
        super().__init__(observe, clock.monotonic)
        self._table = table

    def flooded_by(self, worker: str, instance: str) -> None:
        """Report a worker that has sent this frontend more frames than any engine can produce.

        The worker is then ejected.
        """
        tried = "flood a frontend with frames"
        self.report(self._account(worker), tried, worker=worker, instance=instance, eject=True)

    def claims_flooded_by(self, worker: str) -> None:
        """Report a worker that has published more KV events than any engine can produce.

        The worker is then ejected.
        """
        lives = self._lives(worker)
        tried, instance = "flood the frontends with KV events", lives[-1].instance if lives else ""
        self.report(self._account(worker), tried, worker=worker, instance=instance, eject=True)

    def claims_lost(self, life: Key, why: str) -> None:
        """Report a worker with KV events that are ignored because they were found to be wrong.

        `why` states what was found. The worker is not ejected.
        """
        worker, instance = life
        self.report(self._account(worker), why, worker=worker, instance=instance)

    def _lives(self, worker: str) -> list[facts.WorkerJoined]:
        return [one.joined for one in self._table.endpoints.values() if one.worker == worker]

    def _account(self, worker: str) -> str:
        """Return the broker account of the worker's process."""
        lives = self._lives(worker)
        return account_of(worker, lives[-1].account if lives else "")


class Director:
    """Builds the components of one frontend, passes on changes of the fleet state, and runs periodic work."""

    def __init__(self, world: World, settings: FrontendSettings) -> None:
        self.settings, self._world, self.name = settings, world, world.name
        name, plane, observe, clock = world.name, world.plane, world.observe, world.clock
        # not the loop's time: uvloop freezes that within a turn and rounds it to ms
        self.now = now = clock.monotonic
        # time at which the fold caught up; None before that, while the fold still shows the past
        self._live_at: float | None = None
        self.table = table = EndpointTable(ModelFolders(settings.folders, observe).allows)
        self.metrics = FrontendMetrics()
        self.request_metrics = metrics = RequestMetrics(self.metrics)
        self.running = running = RunningRequests()
        faults = self.metrics.faults
        self.breakers = breakers = LocalBreakers(
            name, settings.breaker, settings.facts, observe, now, plane, faults.panic
        )
        self.exposures = exposures = ServedSpans(name, settings.facts.exposure_entries_max, clock)
        self.peers = Peers(now, name)
        self.routing = routing = Scheduler(
            settings, table, plane, metrics, self.peers, breakers, now, world.dice
        )
        self.traffic = TrafficReporter(name, observe, clock, table, metrics)
        reports = MigrationReports(name, observe, metrics)
        park_s = settings.park_s if settings.park else 0.0
        self.preemption = preemption = Preemption(table, routing, running, reports, now, park_s)
        self.refusals = Refusals(name, settings, table, routing, self.traffic, world.dice)
        self.admission = admission = Admission(settings, table, routing, self.refusals, metrics, preemption)
        self.placer = placer = Placer(name, settings.moving, routing, plane, running, self.peers)
        self.poison = poison = PoisonWatch(name, settings.poison, breakers, plane, observe)
        self.intrusions = WorkerIntrusions(table, observe, clock)
        dispatcher = Dispatcher(table, routing, plane, poison, breakers, running, metrics, self.intrusions)
        self.driver = driver = Driver(
            settings, admission, dispatcher, preemption, placer, exposures, reports, faults, now
        )
        self.planned_moves = PlannedMoves(placer, driver)
        self._convictions = Convictions(name, clock, observe, driver, metrics)

    # --- the fold -----------------------------------------------------------------------------------------

    @property
    def live(self) -> bool:
        """Whether the fleet state has caught up with the journal. Until then, this frontend does not react to changes."""
        return self._live_at is not None

    @property
    def beginning(self) -> bool:
        """Whether it is too early for this frontend to know which models exist.

        This is true until the fleet state has caught up with the journal. If the fleet state then has no model, this
        stays true until a model appears, but at most for BEGINNING_S. Workers of a new fleet register in that time.
        """
        unknown = not self.table.known and not self.table.unnamed
        return self._live_at is None or (unknown and self.now() - self._live_at < BEGINNING_S)

    def absorb(self, fleet: Fleet, batch: Sequence[Recorded]) -> None:
        """Update this frontend to `fleet`, the fleet state after the events in `batch`, and react to what has changed."""
        clock, ours = self._world.clock, self._world.name if self.live else None
        for recorded in batch:
            fact = recorded.fact
            if isinstance(fact, BreakerClosed):
                self.breakers.reset((fact.worker, fact.instance))
            elif isinstance(fact, facts.RequestSuspected | facts.RequestPoisonous) and fact.frontend != ours:
                self.poison.apply_report(fact, (clock.now() - recorded.at).total_seconds())
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
        """React to all later changes of the fleet state, because it has caught up with the journal.

        Also handle the convictions that happened before. `before` is the time until which the previous process of this
        frontend served, or None if unknown.
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
        """React to a change of the endpoint table or of a connection.

        Requests are moved off failed workers, and waiting requests are retried.
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

        The possible targets are looked up once for all requests with the same adapter.
        """
        there = list(self.running.at(endpoint))
        others: dict[str, set[Key]] = {}
        for live in there:
            served = live.request.served
            if served not in others:
                others[served] = {one.key for one in self.routing.targets(live.request)} - {endpoint.key}
            gone = WorkerUnhealthy(endpoint.corrupt, others[served], live.progress)
            self.driver.feed(live, gone)

    def set_thresholds(self, model: str, thresholds: BusyThresholds) -> None:
        """Apply new thresholds above which a model's workers count as busy.

        Also publish the thresholds, so that all frontends apply them.
        """
        fact = facts.BusyThresholdsSet(frontend=self._world.name, model=model, **asdict(thresholds))
        self.table.set_thresholds(fact)
        self._world.observe(fact)

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
        """Count a local breaker's trial as passed at its time limit if the trial's request has produced output.

        The request's complete answer is not awaited, because it may take longer than the time limit.
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
        metrics, faults = self.request_metrics, self.metrics.faults
        metrics.settle()
        faults.parked.set(len(self.driver.waiting.parked))
        faults.put_off.set(len(self.preemption.put_off))
        for model in self.table.known:
            endpoints = self.table.models.get(model, ())
            metrics.gauge_model(model, endpoints, self.routing.limit(model), self.admission.queued(model))
        plane, scheduler = self._world.plane, self.routing
        positions = self.breakers.positions()
        for endpoint in self.table.endpoints.values():
            position, loads = positions.get(endpoint.key, "closed"), plane.load_by_rank(endpoint.worker)
            metrics.gauge_worker(endpoint, position, loads, scheduler.monitor.unread_by_rank(endpoint))
        self.metrics.keep({endpoint.worker for endpoint in self.table.endpoints.values()}, self.table.known)
        metrics.settle_kv(scheduler.state.view, scheduler.state.guessed)
        return self.metrics.render()
