"""Who has to move though nothing has failed, in which order, and how?

    a worker drains ─────────────────────┐
    a device of it lost its NVLink ──────┤ once per     ┌─ with the KV cache, a few at once; the others go on decoding
    a device throttled it below half ────┼─ incident ──▶┤
    an operator wants it: holdfast move ─┘              ├─ where it cannot travel: computed again (device, operator),
                                                        └─ or it stays (drain, throttled) and ends where it is

Where to compute it again is predicted to be quicker than to send it, that is done, whatever the cause. By priority,
then age. The requests of a group of several ranks are planned together: one group that has room takes them all, else
several do; those of a lone worker are spread over the others.

A move that does not come off costs its stream nothing: it stays, or is computed again as above. Where nobody has room it
stays, whoever asked, and is tried again with every tick. A request whose prompt is still being read waits for its first
token.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isinf
from typing import Protocol, TypeAlias

import structlog

from controller.deciders.worker import replacement, spare_awaited
from controller.frontend.generations.live_migration import LiveMigration, Migratable
from controller.frontend.generations.migration_progress import MigrationProgress
from controller.frontend.generations.rescheduler import Reschedulable, Rescheduler
from controller.frontend.request.failures import Failure, PlannedCause
from controller.frontend.request.generation_request import Move
from controller.frontend.scheduling.router import RequestRouter
from controller.migration.cost import MigrationCost, MovingPolicy
from controller.migration.placement import Placement
from controller.ports import RequestPlane, WorkerUnreachable
from controller.router.endpoints import Endpoint, EndpointTable, Key
from controller.router.trust import SourceDistrusted, TrustedSource
from events.observations import MoveRequested

THROTTLED_BELOW = 0.5  # of its weight, by a device
BEGINS_MAX = 8  # in one turn of the loop: to plan one takes a millisecond or two
REFUSALS_MAX = 2  # by targets, after which none is asked any more
NO_ROOM = "no other worker has room"
INSISTS: frozenset[PlannedCause] = frozenset({"device_fault", "operator"})  # computed again, if need be

Planned: TypeAlias = tuple[Placement, Endpoint | None]  # how and where, if anybody can take it
log = structlog.get_logger(__name__)


class Movable(Migratable, Reschedulable, Protocol):
    """What is wanted elsewhere: a generation."""

    @property
    def done(self) -> bool: ...
    @property
    def progress(self) -> MigrationProgress: ...
    @property
    def endpoint(self) -> Endpoint | None: ...

    def compute_again(self, target: Endpoint | None, move: Move) -> None:
        """Leave a worker that has not failed, and go on by the tokens alone, at `target`; None: when it is told to."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class MigrationRequest:
    """An answer that is wanted elsewhere."""

    generation: Movable
    source: Endpoint
    cause: PlannedCause
    to: str = ""  # the only worker that may take it
    planned: str = ""  # where the plan of its whole group sends it
    without: frozenset[str] = frozenset()  # workers that would not take it, or failed
    why: str = ""  # the first of them

    @property
    def stale(self) -> bool:
        """Whether it is not there any more."""
        return self.generation.done or self.generation.endpoint is not self.source

    @property
    def ready(self) -> bool:
        """Whether its tokens come, and nothing is being done about it: it could move now."""
        return self.generation.has_output and self.generation.output.live_migration is None


class PlannedMigrations:
    """The planned moves of one frontend."""

    def __init__(
        self,
        policy: MovingPolicy,
        table: EndpointTable,
        routing: RequestRouter,
        plane: RequestPlane,
        rescheduler: Rescheduler,
        running: Callable[[Endpoint], Collection[Movable]],
        now: Callable[[], float],
    ) -> None:
        self._policy = policy
        self._table = table
        self._routing = routing
        self._plane = plane
        self._rescheduler = rescheduler
        self._running = running
        self._now = now
        self._standing: dict[Key, frozenset[PlannedCause]] = {}
        self._wanted: dict[Key, list[MigrationRequest]] = {}
        self._live_migrations: dict[LiveMigration, MigrationRequest] = {}
        self._due: set[Key] = set()  # workers that are gone on with in the next turn
        self._excused: set[tuple[Key, PlannedCause, str]] = set()  # why streams stay: said once per incident

    @property
    def under_way(self) -> Collection[LiveMigration]:
        """Those whose KV cache is on its way."""
        return self._live_migrations.keys()

    # --- who asks -----------------------------------------------------------------------------------------

    def look(self) -> None:
        """The table or a connection has changed: see whether a reason to move has arisen anywhere."""
        before, self._standing = self._standing, {}
        for endpoint in list(self._table.endpoints.values()):
            reasons = self._reasons(endpoint)
            if reasons:
                self._standing[endpoint.key] = reasons
                for cause in sorted(reasons - before.get(endpoint.key, frozenset())):
                    self._want(endpoint, cause)
        for key in list(self._wanted):
            self._forget(key)
        self._excused = {reason for reason in self._excused if reason[0] in self._table.endpoints}

    def _forget(self, key: Key) -> None:
        """Drop the requests whose reason is gone: a worker that was resumed or repaired keeps what has not moved yet."""
        standing: frozenset[PlannedCause] = self._standing.get(key, frozenset()) | {"operator"}
        for wanted in [wanted for wanted in self._wanted[key] if wanted.cause not in standing]:
            self._drop(key, wanted)

    def _reasons(self, endpoint: Endpoint) -> frozenset[PlannedCause]:
        worker, found = self._table.worker(endpoint), set[PlannedCause]()
        if self._plane.draining(endpoint.worker, endpoint.instance) or self._table.drains(endpoint):
            found.add("drain")
        if worker is not None and worker.health.limits:
            limit = worker.health.limit
            if limit == 0.0:
                if not spare_awaited(worker, self._table.workers):
                    found.add("device_fault")
            elif limit < THROTTLED_BELOW:
                found.add("throttled")
        return frozenset(found)

    def requested(self, fact: MoveRequested) -> None:
        """An operator wants a worker's requests elsewhere."""
        endpoint = self._table.endpoints.get((fact.worker, fact.instance))
        if endpoint is not None:
            self._want(endpoint, "operator", fact.to)

    def _want(self, endpoint: Endpoint, cause: PlannedCause, to: str = "") -> None:
        if cause == "drain" and self._policy.on_drain == "finish":
            return
        wanted_by = {wanted.generation: wanted for wanted in self._wanted.get(endpoint.key, ())}
        generations = [generation for generation in self._running(endpoint) if not stays(generation)]
        planned = self._plan_group(generations, endpoint, to)
        news = {
            generation: MigrationRequest(generation, endpoint, cause, to, planned.get(generation, ""))
            for generation in generations
        }
        if news:
            self._excused = {reason for reason in self._excused if reason[0] != endpoint.key}
            log.info("moves_wanted", worker=endpoint.worker, cause=cause, requests=len(news))
            wanted_by |= {g: wanted for g, wanted in news.items() if cause in INSISTS or g not in wanted_by}
            self._wanted[endpoint.key] = sorted(wanted_by.values(), key=self._rank)
            self._pump(endpoint.key)

    def _rank(self, wanted: MigrationRequest) -> tuple[int, float]:
        """Return who moves first."""
        generation = wanted.generation
        return self._table.urgency(generation.request.tier), generation.stats.began_at

    # --- carrying requests out ------------------------------------------------------------------------------

    def tick(self) -> None:
        """Give up what takes too long, and begin what has become possible."""
        now, limit_s = self._now(), self._policy.max_migration_time_ms / 1000
        for live_migration in list(self._live_migrations):
            if now - live_migration.began_at > limit_s:
                live_migration.give_up(f"it took longer than {self._policy.max_migration_time_ms:g} ms")
        for key in list(self._wanted):
            self._pump(key)

    def _pump(self, key: Key) -> None:
        """Begin as many moves from this worker as may go on at once, a few in each turn of the loop."""
        self._due.discard(key)
        ready = [wanted for wanted in self._wanted.get(key, ()) if wanted.stale or wanted.ready]
        for begun, wanted in enumerate(ready):
            if begun == BEGINS_MAX:
                self._due.add(key)
                asyncio.get_running_loop().call_soon(self._go_on, key)
                return
            if self._count_from(key) >= self._policy.transfers_at_once:
                return
            self._drop(key, wanted)
            if wanted.ready and not wanted.stale and not self._begin(wanted):
                return

    def _go_on(self, key: Key) -> None:
        if key in self._due:
            self._pump(key)

    def _drop(self, key: Key, wanted: MigrationRequest) -> None:
        wanted_by = self._wanted.get(key, [])
        if wanted in wanted_by:
            wanted_by.remove(wanted)
        if not wanted_by:
            self._wanted.pop(key, None)

    def _count_from(self, key: Key) -> int:
        return sum(live_migration.source.key == key for live_migration in self._live_migrations)

    def _transfers(self, source: Endpoint, target: Endpoint) -> int:
        """Return how many transfers share the link of the two already."""
        return sum(c.source is source or c.target is target for c in self._live_migrations)

    def _begin(self, wanted: MigrationRequest) -> bool:
        """Let one request move; False if it has to wait, for others on the same link or for room, and goes on decoding."""
        if stays(wanted.generation):
            return True
        placement, endpoint = self._plan(wanted)
        if endpoint is None or placement.method != "transfer" or placement.cost is None:
            why = wanted.why or self._objection(placement)
            if why or endpoint is None:
                return self._otherwise(wanted, why)
            self._compute_again(wanted, placement.cost, endpoint)
            return True
        others, limit_ms = self._transfers(wanted.source, endpoint), self._policy.max_migration_time_ms
        predicted_ms = placement.cost.transfer_time_ms * (1 + others)
        if others and predicted_ms > limit_ms:
            self._wanted.setdefault(wanted.source.key, []).insert(0, wanted)
            return False
        try:
            self._trust(wanted.source)
            live_migration = LiveMigration(
                wanted.generation,
                endpoint,
                self._routing.at(endpoint, wanted.generation.request, wanted.generation.accepted).holder.rank,
                wanted.cause,
                partial(self._price, wanted, endpoint, 1 + others),
                self._plane,
                self._trust,
                self._ended,
            )
            live_migration.begin(self._now(), limit_ms / 1000)
        except (SourceDistrusted, WorkerUnreachable) as error:
            return self._otherwise(wanted, str(error))
        self._live_migrations[live_migration] = wanted
        return True

    def _price(
        self, wanted: MigrationRequest, target: Endpoint, at_once: int, cached_tokens: int
    ) -> MigrationCost:
        """Return what a move costs of which the target has so many tokens. Who else moves just now does not change which
        method is recommended."""
        price = partial(
            self._rescheduler.price, wanted.generation, wanted.source, target, cached_tokens=cached_tokens
        )
        return replace(price(at_once=at_once), recommended=price().recommended)

    def _trust(self, endpoint: Endpoint) -> TrustedSource:
        return TrustedSource(self._table.worker(endpoint))

    def _plan_group(
        self, generations: Sequence[Movable], source: Endpoint, to: str
    ) -> dict[Reschedulable, str]:
        """Return where the requests of a group of several ranks are sent: to one group that takes all, else to several. A spare
        in their worker's place takes those of a lone worker as well."""
        spare = "" if to else replacement(source.worker, self._table.workers)
        if not generations or (not spare and (len(generations) < 2 or source.joined.tp == 1)):
            return {}
        plan = self._rescheduler.plan(generations, source, to or spare)
        return {
            generation: p.target
            for generation, p, endpoint in plan
            if endpoint is not None and p.method == "transfer"
        }

    def _plan(self, wanted: MigrationRequest) -> Planned:
        """Return where it goes: as the plan of its group said, if it still can be sent there, else as things stand now."""
        if wanted.planned:
            placement, endpoint = self._plan_from(wanted.source, wanted, wanted.planned, wanted.without)
            if endpoint is not None and placement.method == "transfer":
                return placement, endpoint
        return self._plan_from(wanted.source, wanted, wanted.to, wanted.without)

    def _plan_from(
        self, source: Endpoint | None, wanted: MigrationRequest, to: str, without: frozenset[str]
    ) -> Planned:
        ((_, placement, endpoint),) = self._rescheduler.plan([wanted.generation], source, to, without)
        return placement, endpoint if endpoint is not None and self._routing.takes(endpoint) else None

    def _plan_anew(self, wanted: MigrationRequest) -> Planned:
        """Return where it would be computed first, rather not where its KV cache was refused: each looks for itself, so
        that the requests of a group that could not be sent to one place are spread."""
        source = frozenset({wanted.source.worker})
        placement, endpoint = self._plan_from(None, wanted, wanted.to, wanted.without | source)
        if endpoint is None and wanted.without:
            placement, endpoint = self._plan_from(None, wanted, wanted.to, source)
        return placement, endpoint

    def _objection(self, placement: Placement) -> str:
        """Return why it is not sent; empty if to compute it again is simply quicker."""
        cost, limit_ms = placement.cost, self._policy.max_migration_time_ms
        if cost is None:
            return NO_ROOM
        if isinf(cost.transfer_time_ms):
            return "its KV cache cannot be sent there"
        slow = cost.transfer_time_ms > limit_ms
        return f"it would take {cost.transfer_time_ms:.0f} of {limit_ms:g} ms" if slow else ""

    def _otherwise(self, wanted: MigrationRequest, why: str) -> bool:
        """It is not sent: compute it again elsewhere, where that must be; else let it end where it is. False if it waits for
        room: computed again it would wait for the same, and say nothing meanwhile."""
        full = why.startswith((NO_ROOM, "overloaded"))
        if wanted.cause in INSISTS and not full:
            placement, endpoint = self._plan_anew(wanted)
            if endpoint is not None:
                self._compute_again(wanted, placement.cost, endpoint, why)
                return True
        progress = wanted.generation.progress
        progress.transfer_refused(why)
        reason = (wanted.source.key, wanted.cause, why.partition(":")[0])
        if reason not in self._excused:
            self._excused.add(reason)
            log.info("streams_stay", worker=wanted.source.worker, cause=wanted.cause, why=why)
        if full:
            again = replace(wanted, planned="", without=frozenset(), why="")
            self._wanted.setdefault(wanted.source.key, []).append(again)
        return not full

    def _compute_again(
        self, wanted: MigrationRequest, cost: MigrationCost | None, endpoint: Endpoint, why: str = ""
    ) -> None:
        """Let it go on by its tokens alone."""
        generation, reason = wanted.generation, Failure(wanted.cause, "")
        move = Move(reason, reason, wanted.source, self._now(), len(generation.accepted), refused=why)
        move.predicted_ms = cost.reprefill_time_ms if cost is not None else None
        generation.compute_again(endpoint, move)

    def _ended(self, live_migration: LiveMigration) -> None:
        """A move has come to its end, one way or another."""
        wanted, done = self._live_migrations.pop(live_migration), live_migration.transfer
        goes_on = done.state == "switched" or bool(done.why) or live_migration.cheaper is not None
        if live_migration.cheaper is not None and not wanted.stale:
            self._compute_again(wanted, live_migration.cheaper, live_migration.target)
        elif done.state == "stayed" and done.why and not wanted.stale:
            if live_migration.target_failed and len(wanted.without) < REFUSALS_MAX:
                without = wanted.without | {live_migration.target.worker}
                goes_on = self._begin(replace(wanted, without=without, why=wanted.why or done.why))
            else:
                goes_on = self._otherwise(wanted, wanted.why or done.why)
        if goes_on:
            self._pump(wanted.source.key)  # else a tick does: the answer is on its way out, or waits


def stays(generation: Movable) -> bool:
    """Say whether an answer is not to be moved on purpose: where some of it came as text, who goes on would read it anew."""
    continuation = generation.continuation
    return generation.done or bool(continuation.texts) or generation.budget.stays(continuation.length)
