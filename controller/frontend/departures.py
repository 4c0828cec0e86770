"""Which worker goes on with which request, when several have lost theirs at once?

    flights fail ── the turn of the loop ends ──▶ one plan for all of them ──▶ each is sent where the plan says
                                                        └── nothing found there, or not any more ──▶ the router decides

A worker that dies takes all its requests down within one turn. Were each of them routed by itself, the short ones
would count as much as the long ones; so they are planned together (`controller.moving.placement`): by priority, then
age, each where it would be computed first behind what the plan has put there already.

What a reader would get wrong: every frontend plans for its own requests alone, and all of them at the same moment,
from the same reports. Where workers are equal each frontend therefore begins its round at another one (`_share`).
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import structlog
import xxhash

from controller.deciders.capacity import tpot_ms
from controller.deciders.degradation import TIERS
from controller.frontend.plan import Plan
from controller.frontend.routing import Routing
from controller.moving.cost import KvShape, MigrationCost, MovingPolicy, Target, estimate
from controller.moving.links import Lane, lanes
from controller.moving.placement import Leaving, Placement, place
from controller.ports import Plane
from controller.router.table import Seat
from events.observations import KvLayout, WorkerJoined

if TYPE_CHECKING:
    from controller.frontend.flight import Flight

TARGETS_MAX = 64  # that one plan looks at: a thousand requests over them take 50 ms
LOAD_STEPS = 4  # workers whose batches are as full to a quarter count as equal
RESIDENCE_S = 5.0  # how long a place in a full batch is waited for at most; assumed
STEP_S_MAX = 10.0  # a worker that registers a longer one, or none, says nothing of its steps
BLOCKS_UNKNOWN = 10**9  # of a worker whose engine does not count its blocks
_ZERO = datetime(2000, 1, 1, tzinfo=UTC)  # this frontend's clock as instants: only their order counts

log = structlog.get_logger(__name__)


class Departures:
    """The flights of one frontend that have to go on elsewhere, and where each of them goes."""

    def __init__(self, frontend: str, policy: MovingPolicy, routing: Routing, plane: Plane) -> None:
        self._frontend = frontend
        self._policy = policy
        self._routing = routing
        self._plane = plane
        self._waiting: dict[Flight, None] = {}
        self.frontends: Callable[[], Sequence[str]] = lambda: ()  # those that serve now, as far as is known

    # --- after a failure ----------------------------------------------------------------------------------

    def add(self, flight: "Flight") -> None:
        """Send a flight that has no worker elsewhere, together with all that lose theirs in this turn of the loop."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._place)
        self._waiting[flight] = None

    def discard(self, flight: "Flight") -> None:
        """The flight is over: it goes nowhere."""
        self._waiting.pop(flight, None)

    def _place(self) -> None:
        waiting, self._waiting = self._waiting, {}
        if len(waiting) == 1:
            for flight in waiting:
                flight.retry()
            return
        parties: dict[object, list[Flight]] = {}
        for flight in waiting:
            parties.setdefault((flight.plan.model, flight.plan.lineage), []).append(flight)
        for party in parties.values():
            try:
                plan = self.plan(party)
            except Exception:  # they go on without one: nobody else would send them anywhere
                log.exception("group_not_placed", requests=len(party))
                for flight in party:
                    flight.retry()
                continue
            for flight, _, seat in plan:
                flight.retry(seat if seat is not None and self._routing.takes(seat) else None)
            _say(plan)

    # --- the plan -----------------------------------------------------------------------------------------

    def plan(
        self,
        flights: Sequence["Flight"],
        source: Seat | None = None,
        to: str = "",
        without: Collection[str] = (),
    ) -> list[tuple["Flight", Placement, Seat | None]]:
        """Return where each of these flights of one model and lineage should go, in the order in which they should move.

        `source` is the seat that they are still on and whose KV cache may travel; None: it is dead or not trusted, and
        everything is computed again. `to` names the only worker that may take them, `without` those that may not. The
        seat is None where none has room.
        """
        seats = [s for s in self._targets(flights[0].plan) if s is not source and to in ("", s.worker)]
        seats = [s for s in seats if s.worker not in without]
        if source is not None:  # one after the other: each sees where the last one went
            seats.sort(key=lambda seat: (self._in_flight(seat) + 1) / max(seat.weight, 1e-6))
        kv = _kv_shape(source) if source is not None else None
        found = {seat.worker: seat for seat in seats}
        requests = {str(n): flight for n, flight in enumerate(flights)}
        placements = place(
            self._policy,
            kv,
            [self._leaving(name, flight, found) for name, flight in requests.items()],
            [self._target(seat, source if kv is not None else None) for seat in found.values()],
        )
        return [(requests[p.request_id], p, found.get(p.target)) for p in placements]

    def price(
        self, flight: "Flight", source: Seat, seat: Seat, *, cached_tokens: int, at_once: int = 1
    ) -> MigrationCost:
        """Return what it costs to move a flight to this seat, which keeps a place for it and has so many of its first
        tokens in its prefix cache, while so many transfers share the way."""
        tokens = len(flight.plan.prompt) + len(flight.accepted)
        there = self._target(seat, source, newcomers=0)
        kv, cached_tokens = _kv_shape(source), max(0, cached_tokens)
        return estimate(self._policy, kv, there, tokens, cached_tokens=cached_tokens, at_once=at_once)

    def _leaving(self, name: str, flight: "Flight", targets: Mapping[str, Seat]) -> Leaving:
        tier, tried = flight.plan.tier, flight.allowance.tried
        return Leaving(
            request_id=name,
            priority=TIERS.index(tier) if tier in TIERS else len(TIERS),
            arrived=_ZERO + timedelta(seconds=flight.began_at),
            tokens=len(flight.plan.prompt) + len(flight.accepted),
            barred={key[0] for key in tried if key[0] in targets and targets[key[0]].key == key},
        )

    def _targets(self, plan: Plan) -> list[Seat]:
        """Return who could take them, the emptier ones first, and among equals in this frontend's own order."""
        seats = self._routing.targets(plan)
        first = self._share(len(seats))
        turn = {seat.key: (n - first) % len(seats) for n, seat in enumerate(sorted(seats, key=_by_name))}
        seats.sort(key=lambda seat: (self._fullness(seat), turn[seat.key]))
        return seats[:TARGETS_MAX]

    def _share(self, targets: int) -> int:
        """Return at which of so many equal targets this frontend begins. Frontends that know one another begin in equal
        distances; one that knows of no other begins where its name says."""
        others = sorted({*self.frontends(), self._frontend})
        if len(others) > 1:
            return others.index(self._frontend) * targets // len(others)
        return xxhash.xxh32_intdigest(self._frontend.encode()) % max(1, targets)

    def _in_flight(self, seat: Seat) -> int:
        others = self._plane.others(seat.worker)
        return seat.active + seat.promised + (others.running + others.waiting if others is not None else 0)

    def _fullness(self, seat: Seat) -> int:
        return self._in_flight(seat) * LOAD_STEPS // max(1, seat.joined.profile.max_batch)

    def _target(self, seat: Seat, source: Seat | None, newcomers: int = 1) -> Target:
        profile, load = seat.joined.profile, self._plane.load(seat.worker)
        free = load.kv_total - load.kv_used if load is not None and load.kv_total else BLOCKS_UNKNOWN
        rate = profile.prefill_tokens_per_s or self._policy.prefill_tokens_per_s
        places = max(
            1, profile.max_batch
        )  # who registers nonsense must not keep others from being planned for
        in_flight = self._in_flight(seat)
        step_s = tpot_ms(profile, in_flight + newcomers) / 1000 / max(seat.weight, 0.1)
        return Target(
            name=seat.worker,
            profile=replace(
                profile, prefill_tokens_per_s=rate * seat.weight, block_tokens=max(1, profile.block_tokens)
            ),
            free_blocks=max(0, free),
            lanes=self._lanes(source, seat) if source is not None else (),
            queued_tokens=max(_queued_tokens(seat.flights), int(self._routing.choosing.unread(seat))),
            free_places=max(0, places - in_flight),
            queue_s=RESIDENCE_S * max(0, in_flight + newcomers - places) / places,
            step_s=step_s if 0 <= step_s < STEP_S_MAX else 0.0,
        )

    def _lanes(self, source: Seat, target: Seat) -> tuple[Lane, ...]:
        """Return the ways of the shards; none where the target's shards are others."""
        theirs, ours = source.joined, target.joined
        if _shards(theirs) != _shards(ours):
            return ()
        return lanes(self._policy.links, theirs.topology, ours.topology, theirs.tp)


def _say(plan: Sequence[tuple["Flight", Placement, Seat | None]]) -> None:
    """Say what was planned. One line per incident, however many requests."""
    per_target = Counter(placement.target for _, placement, _ in plan if placement.target)
    found = sum(per_target.values())
    log.info("group_placed", requests=len(plan), targets=len(per_target), no_room=len(plan) - found,
             most_at_one=max(per_target.values(), default=0))  # fmt: skip


def _shards(joined: WorkerJoined) -> tuple[object, ...]:
    return joined.kv, joined.tp, joined.profile.block_tokens


def _by_name(seat: Seat) -> tuple[str, str]:
    return seat.key


def _queued_tokens(flights: Iterable["Flight"]) -> int:
    """Return how many tokens of ours wait to be computed there. As a plan counts them, without regard to what is cached: the
    tracker's count, which has what other frontends have told, is less for ours."""
    return sum(len(f.plan.prompt) + len(f.accepted) for f in flights if not f.flows)


def _kv_shape(source: Seat) -> KvShape | None:
    """Return the size of what the source would send; None where it registered none, or one that cannot be."""
    layout: KvLayout | None = source.joined.kv
    if layout is None:
        return None
    try:
        return KvShape(
            layers=layout.layers,
            kv_heads=layout.kv_heads,
            head_size=layout.head_size,
            bytes_per_element=layout.element_bytes,
            tp=source.joined.tp,
        )
    except ValueError:
        return None
