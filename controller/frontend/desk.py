"""The desk that all flights of one frontend report to: who waits, who must move, and what is said about it.

It holds the router's table, this frontend's own breakers, the memory of exposure and the door; it follows the
fold, and acts at once on what it sees there: a convicted worker's streams move, a closed breaker clears what
was held against the worker, a new worker gets the parked ones. Who may get a request is `routing`'s question.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import random

from controller.deciders.fleet import Fleet, Worker
from controller.frontend.admission import Admission
from controller.frontend.choosing import Choosing
from controller.frontend.convictions import Convictions, Served
from controller.frontend.departures import Departures
from controller.frontend.errors import ApiError
from controller.frontend.exposure import Exposures
from controller.frontend.flight import Flight
from controller.frontend.meter import Meter, gauge_model, gauge_router, gauge_worker
from controller.frontend.metrics import FrontendMetrics
from controller.frontend.migration import Failure
from controller.frontend.mover import Mover
from controller.frontend.outcomes import Outcomes
from controller.frontend.panic import Panic
from controller.frontend.plan import Move
from controller.frontend.routing import Routing
from controller.frontend.settings import FrontendSettings
from controller.frontend.tokens import Tokens, load_tokens
from controller.ports import Clock, Observe, Plane
from controller.router.kv_feed import Counts
from controller.router.pick import NoWorker
from controller.router.table import Lineage, Seat, Table
from events.decisions import BreakerClosed, HealthStatus
from events.fact import Recorded
from events.observations import MoveRequested, RequestAbandoned, RequestMigrated, WorkerJoined


@dataclass(frozen=True, slots=True)
class World:
    """What a desk is given of the world."""

    name: str  # this frontend's
    plane: Plane
    observe: Observe
    clock: Clock
    dice: Callable[[], float] = random  # from 0 to below 1: choices that are drawn


class Desk:
    """One frontend's flights, seats and memory."""

    def __init__(self, world: World, settings: FrontendSettings) -> None:
        self.settings = settings
        self.plane = world.plane
        self.now = (
            world.clock.monotonic
        )  # uvloop's own time stands still within a turn, and counts milliseconds
        self.began = world.clock.now()
        self.live = False  # until the fold has caught up, what it shows is history and nothing to act on
        self._world = world
        self._observe = world.observe
        self.table = Table()
        self.metrics = FrontendMetrics()
        self.meter = Meter(self.metrics)
        self.outcomes = Outcomes(world.name, settings.breaker, settings.facts, world.observe, self.now)
        self.exposures = Exposures(
            world.name,
            settings.facts.exposure_entries_max,
            self.began,
            lambda: (world.clock.now(), self.now()),
        )
        panic = Panic(world.name, settings.breaker.panic_share, self.outcomes, world.observe, self.metrics)
        choosing = Choosing(settings.router, self.table, self.plane, self.meter, self.now, world.dice)
        self.routing = Routing(
            world.name, self.table, self.plane, settings, self.outcomes, panic, choosing, lambda: self.live
        )
        self.departures = Departures(world.name, settings.moving, self.routing, self.plane)
        self.mover = Mover(settings.moving, self.table, self.routing, self.plane, self.departures, self.now)
        self.admission = Admission(
            world.name,
            settings.admission,
            self.table,
            self.routing.room,
            world.observe,
            settings.retry_after_s,
            self.meter.waited,
        )
        self._parked: dict[Flight, float] = {}  # until when
        self._flights: dict[Flight, None] = {}  # those without a first token yet
        self._convictions = Convictions(self.exposures)
        self._reported_at = self.now()
        self._counted = Counts()  # of KV events, already in the counters

    # --- the fold -----------------------------------------------------------------------------------------

    def absorb(self, fleet: Fleet, batch: Sequence[Recorded]) -> None:
        """Take in what the fold shows after a batch of events, and act on it."""
        for recorded in batch:
            if isinstance(recorded.fact, BreakerClosed):
                self.outcomes.reset((recorded.fact.worker, recorded.fact.instance))
        change = self.table.absorb(fleet)
        if self.live:
            for recorded in batch:
                if isinstance(recorded.fact, MoveRequested):
                    self.mover.requested(recorded.fact)
        for seat, worker in change.updated:
            if self.live:
                self._convict(worker)
            if worker.passes:
                self.exposures.passed(seat.key, min(worker.passes.values()))
        if change.left:
            self._forget()
        if change:
            self.changed()

    def _convict(self, worker: Worker) -> None:
        """Name everyone whom this worker has fed since, and deal with those in the air."""
        for conviction in self._convictions.news(worker):
            now = self._world.clock.now()
            for fact, trace in self._convictions.convict(worker.joined.worker, conviction, now):
                self._observe(fact, traceparent=trace)
                self.meter.exposed(fact)

    def go_live(self, before: Served | None = None) -> None:
        """The fold has caught up: act on what it shows from now on, and say what was missed. `before`: until when the
        last frontend of this name served, where that is known."""
        self.live = True
        for worker in self.table.workers:
            for fact, trace in self._convictions.missed(self._world.name, worker, before, self.began):
                self._observe(fact, traceparent=trace)
                self.meter.exposed(fact)
        self.changed()

    def set_static(self, joined: Sequence[WorkerJoined]) -> None:
        """Serve with workers that were given directly."""
        self.table.set_static(joined)
        self.routing.forget(set(self.table.seats))
        self.changed()

    def changed(self) -> None:
        """The table or a connection changed: move who must, and let those who wait try."""
        self.routing.look_for_panic()
        for seat in list(self.table.seats.values()):
            if seat.flights and (seat.corrupt or seat.status is HealthStatus.UNHEALTHY):
                self._empty(seat)
        if self.live:
            self.mover.look()
        now = self.now()
        for flight in list(self._parked):
            if flight in self._parked and now >= flight.not_before:
                del self._parked[flight]
                self.departures.add(flight)
        self.admission.wake()

    def _empty(self, seat: Seat) -> None:
        """Send what runs on a worker out of service elsewhere. Who could take it is asked once, not per stream."""
        flights = list(seat.flights)
        others = {other.key for other in self.routing.targets(flights[0].plan)} - {seat.key}
        for flight in flights:
            flight.evict(others, corrupt=seat.corrupt)

    def _forget(self) -> None:
        """Forget lives of workers that are gone."""
        keys = set(self.table.seats)
        self.outcomes.keep(keys)
        self.exposures.keep(keys)
        self.routing.forget(keys)

    # --- what flights say ---------------------------------------------------------------------------------

    def no_worker(self, error: NoWorker, flight: Flight) -> ApiError:
        """Return what a client is told when nobody can take his request."""
        return self.admission.no_worker(error, flight.plan.model, flight.plan.tier)

    def tokens_of(self, lineage: Lineage) -> Tokens:
        """Return a lineage's tokenizer. Raise TokenizerMissing."""
        return load_tokens(lineage[1])

    def boarded(self, flight: Flight, seat: Seat) -> None:
        """A flight's request was sent to a worker."""
        seat.active += 1
        seat.tokens += len(flight.plan.prompt) + flight.plan.sampling.max_tokens
        seat.flights[flight] = None
        flight.sent = self.outcomes.sent(seat.key)
        if flight.first_at is None:
            self._flights[flight] = None

    def alighted(self, flight: Flight, seat: Seat) -> None:
        """A flight has left its worker."""
        seat.active -= 1
        seat.tokens -= len(flight.plan.prompt) + flight.plan.sampling.max_tokens
        seat.flights.pop(flight, None)
        self.routing.choosing.end(flight.slot)
        self.admission.wake(flight.plan.model)

    def first_token(self, flight: Flight) -> None:
        """The first token of an answer has come: its prompt has been read, and another one may be."""
        self._flights.pop(flight, None)
        self.admission.wake(flight.plan.model)

    def landed(self, flight: Flight, seat: Seat) -> None:
        """An answer was completed on this worker."""
        first, count, plan = flight.first_at, len(flight.accepted), flight.plan
        ttft = itl = None
        if flight.first_seat is seat and first is not None:  # one that had begun elsewhere says nothing of it
            ttft = first - flight.began_at
            itl = (self.now() - first) / (count - 1) if count > 1 else None
            self.meter.landed(seat.worker, len(plan.prompt), ttft, itl)
        self.outcomes.served(seat.key, count, ttft, itl, flight.under, flight.sent, model=plan.model)

    def blame(self, seat: Seat, failure: Failure, under: int, sent: int) -> None:
        """A request failed by this worker's fault."""
        self.outcomes.failed(seat.key, failure.reason, under, sent)

    def park(self, flight: Flight) -> None:
        """Nobody can go on with this flight now: it waits for a worker, for a while."""
        self._parked[flight] = flight.moving_since + self.settings.reroute_s

    def migrated(
        self, flight: Flight, move: Move, target: Seat, now: float, *, exact: bool, well: bool
    ) -> None:
        """A flight went on elsewhere: `well` if its next token has come, or that attempt failed too."""
        gap_s = now - (flight.last_at if flight.first_at is not None else move.since)
        if well:
            self.meter.resumed(move.failure.kind.cause, gap_s)
        self._observe(
            RequestMigrated(
                frontend=self._world.name,
                request=flight.plan.request,
                model=flight.plan.model,
                source=move.source.worker,
                source_instance=move.source.instance,
                target=target.worker,
                target_instance=target.instance,
                cause=move.failure.kind.cause,
                method="transfer" if move.carried else "reprefill",
                tokens=move.tokens,
                gap_ms=gap_s * 1000,
                attempt=flight.attempts,
                exact=exact,
                kind_of_move="ongoing_request" if move.tokens else "new_request",
                bytes=move.carried.bytes if move.carried else 0,
                blocks=move.carried.blocks if move.carried else 0,
                link=move.carried.link if move.carried else "",
                predicted_ms=move.predicted_ms,
                refused=move.refused,
            ),
            traceparent=flight.plan.traceparent,
        )

    def abandoned(self, flight: Flight, reason: str) -> None:
        """A flight could not be continued."""
        seat = flight.last_seat
        fact = RequestAbandoned(
            frontend=self._world.name,
            request=flight.plan.request,
            model=flight.plan.model,
            worker=seat.worker if seat is not None else "",
            instance=seat.instance if seat is not None else "",
            reason=reason,
            tokens=len(flight.accepted),
        )
        self._observe(fact, traceparent=flight.plan.traceparent)

    def ended(self, flight: Flight) -> None:
        """A flight is over."""
        if flight.first_at is None:
            self._flights.pop(flight, None)
        if flight.passage is not None:  # else it has never waited for another worker
            self._parked.pop(flight, None)
            self.departures.discard(flight)
        flight.meter.ended(flight, self.now())

    # --- time ---------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Do what is due: breakers, deadlines, reports. Called ten times a second."""
        now = self.now()
        service = [seat.key for seat in self.table.seats.values() if seat.routable]
        if self.outcomes.any_open:
            self._pass_trials()
        self.outcomes.tick(service)
        self.mover.tick()
        self.routing.choosing.expire()
        self.metrics.settle()
        for flight, until in list(self._parked.items()):
            if now > until and flight in self._parked:
                del self._parked[flight]
                flight.give_up()
        for flight in list(self._flights):
            knobs = self.table.knobs(flight.plan.model)
            if now - flight.began_at > self.settings.admission.first_token_s * knobs.latency:
                flight.too_late()
        if now - self._reported_at >= self.settings.facts.rejected_window_s:
            self._reported_at = now
            self.admission.report()
            self.routing.look_for_panic()
        if self._parked:
            self.changed()
        else:
            self.admission.wake()  # another frontend's requests may have ended

    def _pass_trials(self) -> None:
        """An answer may be longer than a trial: one that flows when the time is over has passed it."""
        for seat in self.table.seats.values():
            if self.outcomes.trial_ends(seat.key):
                for flight in seat.flights:
                    if flight.flows:
                        self.outcomes.flows(seat.key, flight.sent)

    def unjudged(self, flight: Flight, seat: Seat) -> None:
        """A request ends on this worker through no fault of it: its client has left, or was mistaken."""
        tell = self.outcomes.flows if flight.flows else self.outcomes.says_nothing
        tell(seat.key, flight.sent)

    def report(self) -> None:
        """Say what has not been said yet, at the process's end."""
        self.outcomes.report()
        self.admission.report()

    def render_metrics(self) -> bytes:
        """Return the metrics as they stand now."""
        self.meter.settle()
        self.metrics.parked.set(len(self._parked))
        for model in self.table.known:
            seats = self.table.models.get(model, ())
            gauge_model(self.metrics, model, seats, self.routing.limit(model), self.admission.queued(model))
        positions = self.outcomes.positions()
        for seat in self.table.seats.values():
            load = self.plane.load(seat.worker)
            unread = self.routing.choosing.unread(seat)
            gauge_worker(self.metrics, seat, positions.get(seat.key, "closed"), load, unread)
        self.metrics.keep({seat.worker for seat in self.table.seats.values()})
        choosing = self.routing.choosing
        self._counted = gauge_router(self.metrics, choosing.view, choosing.guessed, self._counted)
        return self.metrics.render()
