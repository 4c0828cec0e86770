"""Which workers may take a request? The stages of a choice are filter, score and pick; this is the first.

    filter   a model's endpoints, or those of one lineage: routable, reachable, not tried by this request, breaker, room, which
             is for all frontends together (`Headroom`); if any of those that are left was heard lately, only such
    score    here, without regard to what is cached: (requests in flight + 1, and tokens) / weight: lower is better
    pick     the lowest; among equals the one that was picked longest ago

Each way to find no worker is an error of its own, because the client is told different things. `selector` scores and picks with
regard to what is cached, and in other ways.
"""

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from controller.router.endpoints import ConnectedWorkers, Endpoint, Key
from controller.router.load.monitor import LoadMonitor
from events.errors import HoldfastError
from events.wire import Load

ROOM_LOOKS = 8  # at endpoints, for room, before all are looked at
WEIGHT_MIN = 1e-6  # an endpoint that may get nothing costs no more than what this does
TOKENS_PER_REQUEST = 4096  # so many tokens in flight weigh as much as one more request
MANY = 1 << 30  # frontends: none may have more than one request beyond what is free of a worker


class NoWorker(HoldfastError):
    """No worker can take this request."""

    code = "no_worker"


class NotServed(NoWorker):
    """No worker of this model is known."""

    code = "model_not_found"


class NoneRoutable(NoWorker):
    """Every worker of this model is out of service, or its breaker is open."""

    code = "no_routable_worker"


class NoneReachable(NoWorker):
    """The workers of this model that are in service cannot be reached from this frontend."""

    code = "no_reachable_worker"


class AllTried(NoWorker):
    """Every worker of this model that is in service has already failed this request."""

    code = "all_workers_failed"


class AllBusy(NoWorker):
    """Every worker of this model has as many requests in flight as it may have."""

    code = "all_workers_busy"


class AllClosed(NoWorker):
    """The servers behind all workers of this model have too much to do, and said when to retry."""

    code = "upstream_overloaded"

    def __init__(self, wait_s: float, reopens_s: float | None = None) -> None:
        """`wait_s`: until the first of them takes requests again. `reopens_s`: until the first does to which this request
        may still be sent, inf where each has declined it; None: the same."""
        super().__init__()
        self.wait_s = wait_s
        self.reopens_s = wait_s if reopens_s is None else reopens_s


class Headroom(Enum):
    """How much room must there be at a worker for one request more?"""

    FRESH = "fresh"  # for one that begins: below the frontends' cap, too
    HELD = "held"  # for one that has begun: below what the worker says it can hold
    NONE = "none"  # however full it is: nothing is sent


_HELD, _NONE = Headroom.HELD, Headroom.NONE  # to look a member of an enum up takes as long as a call


@dataclass(slots=True)
class Rules:
    """What the filter and the score know about endpoints: values of this moment, and what lies below them."""

    plane: ConnectedWorkers
    load: LoadMonitor
    barred: Container[Key] = ()  # endpoints to which this frontend's own breakers let nothing go
    frontends: int = 1  # that serve now, this one included; `MANY`: none waits for another one's share
    contenders: Mapping[str, int] = field(default_factory=dict)  # by model, frontends whose requests wait


class Picker:
    """Picks endpoints. Remembers only which one's turn it is."""

    def __init__(self) -> None:
        self._turn = 0
        self._looked_at = 0  # of the first endpoint that was looked at last for room
        self._last: dict[Key, int] = {}

    def pick(
        self,
        endpoints: Sequence[Endpoint],
        rules: Rules,
        tried: Collection[Key] = (),
        room: Headroom = Headroom.FRESH,
    ) -> Endpoint:
        """Return the best endpoint. Raise what `Filter.left` does."""
        left = Filter(endpoints, rules, tried, room).left()
        return self._taken(left[min(self._ranked(left, rules))[2]])

    def room(self, endpoints: Sequence[Endpoint], rules: Rules) -> Endpoint:
        """Return an endpoint with room for one request more: the best of a few that are next in turn, and of all only where none
        of these has room. Raise what `pick` raises."""
        among, size, few = Filter(endpoints, rules), len(endpoints), endpoints
        if size > ROOM_LOOKS:
            self._looked_at = (self._looked_at + ROOM_LOOKS) % size
            few = [endpoints[(self._looked_at + n) % size] for n in range(ROOM_LOOKS)]
        for _, _, index in sorted(self._ranked(few, rules)):
            if among.fits(few[index]):  # most often the first: no other is looked at
                return self._taken(few[index])
        return self.pick(endpoints, rules)

    def _ranked(self, endpoints: Sequence[Endpoint], rules: Rules) -> list[tuple[float, int, int]]:
        """Return the cost of each endpoint, when it was picked last, and its index."""
        last, external_load, ranked = self._last, rules.plane.external_load, []
        for index, endpoint in enumerate(endpoints):
            ranked.append((cost(endpoint, external_load(endpoint.worker)), last.get(endpoint.key, 0), index))
        return ranked

    def _taken(self, endpoint: Endpoint) -> Endpoint:
        """Remember that it was this one's turn."""
        self._turn += 1
        self._last[endpoint.key] = self._turn
        return endpoint

    def forget(self, keys: Collection[Key]) -> None:
        """Drop the memory of endpoints that are gone; keep `keys`."""
        self._last = {key: turn for key, turn in self._last.items() if key in keys}


class Filter(msgspec.Struct, eq=False):  # a struct: each request makes two
    """Which of a model's endpoints may take one request? Together, or one by one: where the best is known before, one look at it
    is enough."""

    all: Sequence[Endpoint]
    rules: Rules
    tried: Collection[Key] = ()
    room: Headroom = Headroom.FRESH
    tokens: int = 0  # of the prompt and the longest answer: a worker's context must hold them

    def left(self) -> list[Endpoint]:
        """Return all that are left, at least one. Raise NotServed, NoneRoutable, NoneReachable, AllTried, AllBusy or
        AllClosed."""
        plane = self.rules.plane
        reachable = [
            one for one in self.all if one.weight > 0.0 and plane.reachable(one.worker, one.instance)
        ]
        tried, tokens, barred = self.tried, self.tokens, self.rules.barred
        allowed = [
            one
            for one in reachable
            if one.key not in tried and one.context_tokens >= tokens and one.key not in barred
        ]
        if not allowed:
            raise self._why_none(reachable)
        free = allowed if self.room is _NONE else [one for one in allowed if self.has_room(one)]
        if not free:
            loads = [plane.external_load(one.worker) for one in allowed]
            wait_s = min(0.0 if load is None else load.closed_s for load in loads)
            raise AllClosed(wait_s) if wait_s else AllBusy()
        return [one for one in free if plane.recently_heard(one.worker, one.instance)] or free

    def fits(self, endpoint: Endpoint) -> bool:
        """Say whether an endpoint would be left, also if others are better."""
        rules, key = self.rules, endpoint.key
        return (
            endpoint.weight > 0.0
            and rules.plane.recently_heard(endpoint.worker, endpoint.instance)
            and key not in self.tried
            and endpoint.context_tokens >= self.tokens
            and key not in rules.barred
            and (self.room is _NONE or self.has_room(endpoint))
        )

    def has_room(self, endpoint: Endpoint) -> bool:
        """Say whether there is room for one request more.

        What the worker can hold is never passed. Below that each frontend may always fill its own share of the cap, and where
        others' requests wait, too, none takes more than its share of the worker: one that came late would else wait for the
        others, which see first that something has ended. Whether so few are enough is asked last: in an overload nearly all are
        full by the counts, and a look at each one's KV blocks would take most of a frontend's time.
        """
        own, rules, holds = endpoint.active + endpoint.kept.requests, self.rules, endpoint.holds
        external = rules.plane.external_load(endpoint.worker)
        there = own if external is None else own + external.running + external.waiting
        if there >= holds:
            return False
        if external is not None and (external is endpoint.refused_at or external.closed_s):
            return False
        if self.room is _HELD:
            return True
        load, contenders, frontends = rules.load, rules.contenders, rules.frontends
        cap = load.cap(endpoint)
        if own >= cap or (contenders and own * contenders.get(endpoint.model, 1) >= holds):
            return False
        if there >= cap and frontends > 1 and own * frontends >= cap:
            return False
        return not (load.decides and load.has_enough(endpoint))

    def _why_none(self, reachable: Sequence[Endpoint]) -> NoWorker:
        """Return what is in the way of the last of them: so far they would have come."""
        if not self.all:
            return NotServed()
        if not reachable:
            return NoneReachable() if any(one.routable for one in self.all) else NoneRoutable()
        return NoneRoutable() if any(one.key not in self.tried for one in reachable) else AllTried()


def cost(endpoint: Endpoint, external: Load | None) -> float:
    """Return how much a request would wait there: behind ours, which we know to the moment, and behind others'.

    The worker's report of everything is not simply compared with ours: it is older, and all frontends
    would send to the worker whose last report happens to be the oldest.
    """
    active, tokens = endpoint.active + endpoint.kept.requests, endpoint.tokens
    if external is not None:
        active += external.running + external.waiting
        tokens += external.active_tokens
    weight = endpoint.weight
    return (active + 1 + tokens / TOKENS_PER_REQUEST) / (weight if weight > WEIGHT_MIN else WEIGHT_MIN)
