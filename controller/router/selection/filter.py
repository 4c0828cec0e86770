"""Filters the workers that may take a request, which is the first of the three stages of a selection.

The stages of the selection:

    filter   keeps the endpoints of one model, or of one of its lineages, that are routable and reachable, and have headroom
             (`Headroom`). Their context must be long enough, and this frontend's breaker for them not open. Endpoints that
             this request has tried are left out. If some of the endpoints have sent a message recently, only these are kept
    score    in this module without cached prefixes: (requests + 1 + tokens / TOKENS_PER_REQUEST) / weight
    pick     the lowest score, which is the best; among equal scores the endpoint picked longest ago

Each reason for finding no worker is a separate error, because clients get different responses. `selector` scores and
picks with cached prefixes, and in other modes.
"""

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from controller.router.endpoints import ConnectedWorkers, Endpoint, Key
from controller.router.load.monitor import LoadMonitor
from events.errors import HoldfastError
from events.wire import Load

ROOM_LOOKS = 8  # endpoints checked for room before all endpoints are checked
WEIGHT_MIN = 1e-6  # an endpoint of a lower weight costs as much as one of this weight
TOKENS_PER_REQUEST = 4096  # number of tokens in flight that cost as much as one more request
# number of frontends with which each may have at most one request beyond a worker's free slots
MANY = 1 << 30


class NoWorker(HoldfastError):
    """No worker can serve this request."""

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
    """Every worker of this model is at its limit of requests in flight."""

    code = "all_workers_busy"


class AllClosed(NoWorker):
    """The servers behind all workers of this model are overloaded, and reported when to retry."""

    code = "upstream_overloaded"

    def __init__(self, wait_s: float, reopens_s: float | None = None) -> None:
        """Set the retry times of the error.

        Args:
            wait_s: seconds until the first of the overloaded servers accepts requests again.
            reopens_s: seconds until the first overloaded server that has not declined this request accepts requests
                again; inf if all servers have declined the request; None for the value of `wait_s`.
        """
        super().__init__()
        self.wait_s = wait_s
        self.reopens_s = wait_s if reopens_s is None else reopens_s


class Headroom(Enum):
    """How much free capacity a worker needs to be chosen: that for a new request, that for a begun one, or none."""

    FRESH = "fresh"  # for a new request: below the frontends' cap and below the worker's registered limit
    HELD = "held"  # for a request that has begun: below the worker's registered limit
    NONE = "none"  # no capacity, because nothing is sent


_HELD, _NONE = Headroom.HELD, Headroom.NONE  # looking up an enum member takes as long as a call


@dataclass(slots=True)
class Rules:
    """The inputs of filter and score besides the endpoints: connections, load and limits."""

    plane: ConnectedWorkers
    load: LoadMonitor
    barred: Container[Key] = ()  # endpoints that this frontend's own breakers reject
    frontends: int = 1  # number of frontends that serve now, with this one; `MANY`: see there
    # by model, the number of frontends with waiting requests
    contenders: Mapping[str, int] = field(default_factory=dict)


class Picker:
    """Picks endpoints for requests without a prompt to score. Remembers when each endpoint was last picked."""

    def __init__(self) -> None:
        self._turn = 0  # number of picks
        self._looked_at = 0  # index of the first endpoint in the last check for room
        self._last: dict[Key, int] = {}  # number of the last pick of each endpoint

    def pick(
        self,
        endpoints: Sequence[Endpoint],
        rules: Rules,
        tried: Collection[Key] = (),
        room: Headroom = Headroom.FRESH,
    ) -> Endpoint:
        """Return the endpoint of the lowest cost among those that pass the filter.

        Raise the errors of `Filter.left` if none passes.
        """
        left = Filter(endpoints, rules, tried, room).left()
        return self._record(left[min(self._ranked(left, rules))[2]])

    def room(self, endpoints: Sequence[Endpoint], rules: Rules) -> Endpoint:
        """Return an endpoint with room for one more request. Raise the errors of `Filter.left` if no endpoint has room.

        The result is the best of the next few endpoints in rotation. All endpoints are considered only if none of
        these has room.
        """
        among, size, few = Filter(endpoints, rules), len(endpoints), endpoints
        if size > ROOM_LOOKS:
            self._looked_at = (self._looked_at + ROOM_LOOKS) % size
            few = [endpoints[(self._looked_at + n) % size] for n in range(ROOM_LOOKS)]
        for _, _, index in sorted(self._ranked(few, rules)):
            if among.fits(few[index]):  # usually the first; then no other is checked
                return self._record(few[index])
        return self.pick(endpoints, rules)

    def _ranked(self, endpoints: Sequence[Endpoint], rules: Rules) -> list[tuple[float, int, int]]:
        """Return for each endpoint its cost, the number of its last pick, and its index."""
        last, external_load, ranked = self._last, rules.plane.external_load, []
        for index, endpoint in enumerate(endpoints):
            ranked.append((cost(endpoint, external_load(endpoint.worker)), last.get(endpoint.key, 0), index))
        return ranked

    def _record(self, endpoint: Endpoint) -> Endpoint:
        """Record that this endpoint was picked, and return it."""
        self._turn += 1
        self._last[endpoint.key] = self._turn
        return endpoint

    def forget(self, keys: Collection[Key]) -> None:
        """Forget the last picks of endpoints that no longer exist. `keys` names those that exist."""
        self._last = {key: turn for key, turn in self._last.items() if key in keys}


class Filter(msgspec.Struct, eq=False):  # a struct is fast to create, and each request makes two
    """Decides which of a model's endpoints may take one request: all at once (`left`), or one at a time (`fits`).

    If the best endpoint is already known, a single check is enough.
    """

    all: Sequence[Endpoint]
    rules: Rules
    tried: Collection[Key] = ()
    room: Headroom = Headroom.FRESH
    tokens: int = 0  # tokens of the prompt and the longest answer, which must fit into a worker's context

    def left(self) -> list[Endpoint]:
        """Return the endpoints that may take the request, at least one.

        Raise NotServed, NoneRoutable, NoneReachable, AllTried, AllBusy or AllClosed if no endpoint may.
        """
        plane = self.rules.plane
        reachable = [
            one for one in self.all if one.weight > 0.0 and plane.reachable(one.worker, one.instance)
        ]
        tried, tokens, barred = self.tried, self.tokens, self.rules.barred
        fitting = [one for one in reachable if one.context_tokens >= tokens]
        allowed = [one for one in fitting if one.key not in tried and one.key not in barred]
        if not allowed:
            raise self._why_none(reachable)
        free = allowed if self.room is _NONE else [one for one in allowed if self.has_room(one)]
        if not free:
            raise self._why_full(allowed)
        return [one for one in free if plane.recently_heard(one.worker, one.instance)] or free

    def fits(self, endpoint: Endpoint) -> bool:
        """Return whether an endpoint may take the request. Other endpoints may be better."""
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
        """Return whether an endpoint has the required headroom for one more request.

        The requests at a worker never exceed the worker's registered limit. A request that has begun needs to meet only this
        limit. For a new request, this frontend's own requests at the worker must also be below `LoadMonitor.cap`. If the
        requests of all frontends together reach the cap, this frontend may add requests only up to an equal share of the cap.
        If several frontends have waiting requests, each of these frontends may use only an equal share of the registered
        limit. Without equal shares, a frontend that notices free slots late would wait for the other frontends.

        The load check comes last, because it compares KV blocks, which is slow. In an overload, the counts of requests
        already exclude nearly all workers.
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

    def _why_full(self, allowed: Sequence[Endpoint]) -> NoWorker:
        plane = self.rules.plane
        loads = [plane.external_load(one.worker) for one in allowed]
        wait_s = min(0.0 if load is None else load.closed_s for load in loads)
        return AllClosed(wait_s) if wait_s else AllBusy()

    def _why_none(self, reachable: Sequence[Endpoint]) -> NoWorker:
        """Return the error for the stage of the filter that left no endpoint."""
        if not self.all:
            return NotServed()
        if not reachable:
            return NoneReachable() if any(one.routable for one in self.all) else NoneRoutable()
        return NoneRoutable() if any(one.key not in self.tried for one in reachable) else AllTried()


def cost(endpoint: Endpoint, external: Load | None) -> float:
    """Return the load at an endpoint divided by its weight, as a measure of a request's wait at this endpoint.

    The load is this frontend's requests, counted exactly, plus the external load. The total load that a worker reports is
    not used, because it is outdated. With it, all frontends would send to the worker with the oldest report.
    """
    active, tokens, weight = endpoint.active + endpoint.kept.requests, endpoint.tokens, endpoint.weight
    if external is not None:
        active += external.running + external.waiting
        tokens += external.active_tokens
        weight *= external.weight
    return (active + 1 + tokens / TOKENS_PER_REQUEST) / (weight if weight > WEIGHT_MIN else WEIGHT_MIN)
