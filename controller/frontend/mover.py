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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isinf
from typing import TYPE_CHECKING, TypeAlias

import structlog

from controller.deciders.degradation import TIERS
from controller.frontend.crossing import Crossing
from controller.frontend.departures import Departures
from controller.frontend.migration import Failure, PlannedCause
from controller.frontend.plan import Move
from controller.frontend.routing import Routing
from controller.moving.cost import MigrationCost, MovingPolicy
from controller.moving.placement import Placement
from controller.ports import Plane, WorkerUnreachable
from controller.router.table import Key, Seat, Table
from controller.router.trust import Distrusted, Trusted
from events.observations import MoveRequested

if TYPE_CHECKING:
    from controller.frontend.flight import Flight

THROTTLED_BELOW = 0.5  # of its weight, by a device
BEGINS_MAX = 8  # in one turn of the loop: to plan one takes a millisecond or two
REFUSALS_MAX = 2  # by targets, after which none is asked any more
NO_ROOM = "no other worker has room"
INSISTS: frozenset[PlannedCause] = frozenset({"device_fault", "operator"})  # computed again, if need be

Planned: TypeAlias = tuple[Placement, Seat | None]  # how and where, if anybody can take it
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Wish:
    """A request that is wanted elsewhere."""

    flight: "Flight"
    source: Seat
    cause: PlannedCause
    to: str = ""  # the only worker that may take it
    planned: str = ""  # where the plan of its whole group sends it
    without: frozenset[str] = frozenset()  # workers that would not take it, or failed
    why: str = ""  # the first of them

    @property
    def stale(self) -> bool:
        """Whether the request is not there any more."""
        return self.flight.done or self.flight.seat is not self.source

    @property
    def rank(self) -> tuple[int, float]:
        """Who moves first."""
        tier = self.flight.plan.tier
        return TIERS.index(tier) if tier in TIERS else len(TIERS), self.flight.began_at


class Mover:
    """The planned moves of one frontend."""

    def __init__(
        self,
        policy: MovingPolicy,
        table: Table,
        routing: Routing,
        plane: Plane,
        departures: Departures,
        now: Callable[[], float],
    ) -> None:
        self._policy = policy
        self._table = table
        self._routing = routing
        self._plane = plane
        self._departures = departures
        self._now = now
        self._standing: dict[Key, frozenset[PlannedCause]] = {}
        self._wishes: dict[Key, list[Wish]] = {}
        self._crossings: dict[Crossing, Wish] = {}
        self._due: set[Key] = set()  # workers that are gone on with in the next turn
        self._excused: set[tuple[Key, PlannedCause, str]] = set()  # why streams stay: said once per incident

    # --- who asks -----------------------------------------------------------------------------------------

    def look(self) -> None:
        """The table or a connection has changed: see whether a reason to move has arisen anywhere."""
        before, self._standing = self._standing, {}
        for seat in list(self._table.seats.values()):
            reasons = self._reasons(seat)
            if reasons:
                self._standing[seat.key] = reasons
                for cause in sorted(reasons - before.get(seat.key, frozenset())):
                    self._want(seat, cause)
        for key in list(self._wishes):
            self._forget(key)
        self._excused = {said for said in self._excused if said[0] in self._table.seats}

    def _forget(self, key: Key) -> None:
        """Drop the wishes whose reason is gone: a worker that was resumed or repaired keeps what has not moved yet."""
        standing: frozenset[PlannedCause] = self._standing.get(key, frozenset()) | {"operator"}
        for wish in [wish for wish in self._wishes[key] if wish.cause not in standing]:
            self._drop(key, wish)

    def _reasons(self, seat: Seat) -> frozenset[PlannedCause]:
        worker, found = self._table.worker(seat), set[PlannedCause]()
        if self._plane.draining(seat.worker, seat.instance) or self._table.drains(seat):
            found.add("drain")
        if worker is not None and worker.health.limits:
            limit = worker.health.limit
            if limit == 0.0:
                found.add("device_fault")
            elif limit < THROTTLED_BELOW:
                found.add("throttled")
        return frozenset(found)

    def requested(self, fact: MoveRequested) -> None:
        """An operator wants a worker's requests elsewhere."""
        seat = self._table.seats.get((fact.worker, fact.instance))
        if seat is not None:
            self._want(seat, "operator", fact.to)

    def _want(self, seat: Seat, cause: PlannedCause, to: str = "") -> None:
        if cause == "drain" and self._policy.on_drain == "finish":
            return
        wishes = {wish.flight: wish for wish in self._wishes.get(seat.key, ())}
        flights = [flight for flight in seat.flights if not flight.stays]
        planned = self._plan_group(flights, seat, to)
        news = {flight: Wish(flight, seat, cause, to, planned.get(flight, "")) for flight in flights}
        if news:
            self._excused = {said for said in self._excused if said[0] != seat.key}
            log.info("moves_wanted", worker=seat.worker, cause=cause, requests=len(news))
            wishes |= {f: wish for f, wish in news.items() if cause in INSISTS or f not in wishes}
            self._wishes[seat.key] = sorted(wishes.values(), key=lambda wish: wish.rank)
            self._pump(seat.key)

    # --- carrying wishes out ------------------------------------------------------------------------------

    def tick(self) -> None:
        """Give up what takes too long, and begin what has become possible."""
        now, limit_s = self._now(), self._policy.max_migration_time_ms / 1000
        for crossing in list(self._crossings):
            if now - crossing.began_at > limit_s:
                crossing.give_up(f"it took longer than {self._policy.max_migration_time_ms:g} ms")
        for key in list(self._wishes):
            self._pump(key)

    def _pump(self, key: Key) -> None:
        """Begin as many moves from this worker as may go on at once, a few in each turn of the loop."""
        self._due.discard(key)
        ready = [wish for wish in self._wishes.get(key, ()) if wish.stale or wish.flight.ready]
        for begun, wish in enumerate(ready):
            if begun == BEGINS_MAX:
                self._due.add(key)
                asyncio.get_running_loop().call_soon(self._go_on, key)
                return
            if self._under_way(key) >= self._policy.transfers_at_once:
                return
            self._drop(key, wish)
            if wish.flight.ready and not wish.stale and not self._begin(wish):
                return

    def _go_on(self, key: Key) -> None:
        if key in self._due:
            self._pump(key)

    def _drop(self, key: Key, wish: Wish) -> None:
        wishes = self._wishes.get(key, [])
        if wish in wishes:
            wishes.remove(wish)
        if not wishes:
            self._wishes.pop(key, None)

    def _under_way(self, key: Key) -> int:
        return sum(crossing.source.key == key for crossing in self._crossings)

    def _transfers(self, source: Seat, target: Seat) -> int:
        """Return how many transfers share the link of the two already."""
        return sum(c.source is source or c.target is target for c in self._crossings)

    def _begin(self, wish: Wish) -> bool:
        """Let one request move; False if it has to wait, for others on the same link or for room, and goes on decoding."""
        if wish.flight.stays:
            return True
        placement, seat = self._plan(wish)
        if seat is None or placement.method != "transfer" or placement.cost is None:
            why = wish.why or self._objection(placement)
            if why or seat is None:
                return self._otherwise(wish, why)
            self._compute_again(wish, placement.cost, seat)
            return True
        others, limit_ms = self._transfers(wish.source, seat), self._policy.max_migration_time_ms
        predicted_ms = placement.cost.transfer_time_ms * (1 + others)
        if others and predicted_ms > limit_ms:
            self._wishes.setdefault(wish.source.key, []).insert(0, wish)
            return False
        try:
            self._trust(wish.source)
            crossing = Crossing(
                wish.flight,
                seat,
                self._routing.at(seat, wish.flight.plan, wish.flight.accepted).holder.rank,
                wish.cause,
                partial(self._price, wish, seat, 1 + others),
                self._plane,
                self._trust,
                self._ended,
            )
            crossing.begin(self._now(), limit_ms / 1000)
        except (Distrusted, WorkerUnreachable) as error:
            return self._otherwise(wish, str(error))
        self._crossings[crossing] = wish
        return True

    def _price(self, wish: Wish, target: Seat, at_once: int, cached_tokens: int) -> MigrationCost:
        """Return what a move costs of which the target has so many tokens. Who else moves just now does not change which
        method is recommended."""
        price = partial(self._departures.price, wish.flight, wish.source, target, cached_tokens=cached_tokens)
        return replace(price(at_once=at_once), recommended=price().recommended)

    def _trust(self, seat: Seat) -> Trusted:
        return Trusted(self._table.worker(seat))

    def _plan_group(self, flights: Sequence["Flight"], source: Seat, to: str) -> dict["Flight", str]:
        """Return where the requests of a group of several ranks are sent: to one group that takes all, else to several."""
        if len(flights) < 2 or source.joined.tp == 1:
            return {}
        plan = self._departures.plan(flights, source, to)
        return {flight: p.target for flight, p, seat in plan if seat is not None and p.method == "transfer"}

    def _plan(self, wish: Wish) -> Planned:
        """Return where it goes: as the plan of its group said, if it still can be sent there, else as things stand now."""
        if wish.planned:
            placement, seat = self._plan_from(wish.source, wish, wish.planned, wish.without)
            if seat is not None and placement.method == "transfer":
                return placement, seat
        return self._plan_from(wish.source, wish, wish.to, wish.without)

    def _plan_from(self, source: Seat | None, wish: Wish, to: str, without: frozenset[str]) -> Planned:
        ((_, placement, seat),) = self._departures.plan([wish.flight], source, to, without)
        return placement, seat if seat is not None and self._routing.takes(seat) else None

    def _plan_anew(self, wish: Wish) -> Planned:
        """Return where it would be computed first, rather not where its KV cache was refused: each looks for itself, so
        that the requests of a group that could not be sent to one place are spread."""
        source = frozenset({wish.source.worker})
        placement, seat = self._plan_from(None, wish, wish.to, wish.without | source)
        if seat is None and wish.without:
            placement, seat = self._plan_from(None, wish, wish.to, source)
        return placement, seat

    def _objection(self, placement: Placement) -> str:
        """Return why it is not sent; empty if to compute it again is simply quicker."""
        cost, limit_ms = placement.cost, self._policy.max_migration_time_ms
        if cost is None:
            return NO_ROOM
        if isinf(cost.transfer_time_ms):
            return "its KV cache cannot be sent there"
        slow = cost.transfer_time_ms > limit_ms
        return f"it would take {cost.transfer_time_ms:.0f} of {limit_ms:g} ms" if slow else ""

    def _otherwise(self, wish: Wish, why: str) -> bool:
        """It is not sent: compute it again elsewhere, where that must be; else let it end where it is. False if it waits for
        room: computed again it would wait for the same, and say nothing meanwhile."""
        full = why.startswith((NO_ROOM, "overloaded"))
        if wish.cause in INSISTS and not full:
            placement, seat = self._plan_anew(wish)
            if seat is not None:
                self._compute_again(wish, placement.cost, seat, why)
                return True
        wish.flight.refused = why
        said = (wish.source.key, wish.cause, why.partition(":")[0])
        if said not in self._excused:
            self._excused.add(said)
            log.info("streams_stay", worker=wish.source.worker, cause=wish.cause, why=why)
        if full:
            again = replace(wish, planned="", without=frozenset(), why="")
            self._wishes.setdefault(wish.source.key, []).append(again)
        return not full

    def _compute_again(self, wish: Wish, cost: MigrationCost | None, seat: Seat, why: str = "") -> None:
        """Let it go on by its tokens alone."""
        flight, reason = wish.flight, Failure(wish.cause, "")
        move = Move(reason, reason, wish.source, self._now(), len(flight.accepted), refused=why)
        move.predicted_ms = cost.reprefill_time_ms if cost is not None else None
        flight.compute_again(seat, move)

    def _ended(self, crossing: Crossing) -> None:
        """A move has come to its end, one way or another."""
        wish, done = self._crossings.pop(crossing), crossing.transfer
        goes_on = done.state == "switched" or bool(done.why) or crossing.cheaper is not None
        if crossing.cheaper is not None and not wish.stale:
            self._compute_again(wish, crossing.cheaper, crossing.target)
        elif done.state == "stayed" and done.why and not wish.stale:
            if crossing.target_failed and len(wish.without) < REFUSALS_MAX:
                without = wish.without | {crossing.target.worker}
                goes_on = self._begin(replace(wish, without=without, why=wish.why or done.why))
            else:
                goes_on = self._otherwise(wish, wish.why or done.why)
        if goes_on:
            self._pump(wish.source.key)  # else a tick does: the flight is on its way out, or waits
