"""Filters the workers that may take a request. Filter, score and pick are the stages of the selection.

    filter   a model's endpoints, or those of one lineage: routable, reachable, not tried by this request, breaker, room
             shared by all frontends (`Headroom`); if any that remain sent a message recently, only those
    score    here without cached prefixes: (requests in flight + 1, and tokens) / weight; lower is better
    pick     the lowest; among equals the one picked longest ago

Each reason for finding no worker is a separate error, because clients get different responses. `selector` scores and picks
with cached prefixes, and in other modes.
"""

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from controller.router.endpoints import ConnectedWorkers, Endpoint, Key
from controller.router.load.monitor import LoadMonitor
from events.errors import HoldfastError
from events.wire import Load

ROOM_LOOKS = 8  # endpoints checked for room before all are
WEIGHT_MIN = 1e-6  # an endpoint of weight 0 costs as much as one of this weight
TOKENS_PER_REQUEST = 4096  # tokens in flight that weigh as much as one more request
MANY = 1 << 30  # frontends: each may have at most one request beyond a worker's free room


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
        """Initialize the error with its retry times.

        Args:
            wait_s: seconds until the first of them accepts requests again.
            reopens_s: seconds until the first one to which this request may still be sent does; inf if each has declined
                it; None: the same as `wait_s`.
        """
        super().__init__()
        self.wait_s = wait_s
        self.reopens_s = wait_s if reopens_s is None else reopens_s


class Headroom(Enum):
    """The room that a worker must have for one more request."""

    FRESH = "fresh"  # a new request: below the frontends' cap as well
    HELD = "held"  # a request that has begun: below what the worker registered it can hold
    NONE = "none"  # none: nothing is sent


_HELD, _NONE = Headroom.HELD, Headroom.NONE  # looking up an enum member takes as long as a call


@dataclass(slots=True)
class Rules:
    """The current inputs of filter and score: connections, load and limits."""

    plane: ConnectedWorkers
    load: LoadMonitor
    barred: Container[Key] = ()  # endpoints that this frontend's own breakers reject
    frontends: int = 1  # that serve now, including this one; `MANY`: no frontend waits for another's share
    contenders: Mapping[str, int] = field(default_factory=dict)  # by model, frontends with waiting requests


class Picker:
    """Picks endpoints. Its only state is when each was last picked."""

    def __init__(self) -> None:
        self._turn = 0
        self._looked_at = 0  # index of the first endpoint that was last checked for room
        self._last: dict[Key, int] = {}

    def pick(
        self,
        endpoints: Sequence[Endpoint],
        rules: Rules,
        tried: Collection[Key] = (),
        room: Headroom = Headroom.FRESH,
    ) -> Endpoint:
        """Return the best endpoint. Raise the errors of `Filter.left`."""
        left = Filter(endpoints, rules, tried, room).left()
        return self._record(left[min(self._ranked(left, rules))[2]])

    def room(self, endpoints: Sequence[Endpoint], rules: Rules) -> Endpoint:
        """Return an endpoint with room for one more request. Raise the errors of `pick`.

        It is the best of the next few in rotation. All are considered only if none of these has room.
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
        """Return each endpoint's cost, last turn and index."""
        last, external_load, ranked = self._last, rules.plane.external_load, []
        for index, endpoint in enumerate(endpoints):
            ranked.append((cost(endpoint, external_load(endpoint.worker)), last.get(endpoint.key, 0), index))
        return ranked

    def _record(self, endpoint: Endpoint) -> Endpoint:
        """Record that this endpoint was picked."""
        self._turn += 1
        self._last[endpoint.key] = self._turn
        return endpoint

    def forget(self, keys: Collection[Key]) -> None:
        """Drop all endpoints except `keys`."""
        self._last = {key: turn for key, turn in self._last.items() if key in keys}


class Filter(msgspec.Struct, eq=False):  # a struct: each request makes two
    """Decides which of a model's endpoints may take one request: all at once, or one at a time.

    If the best endpoint is already known, a single check is enough.
    """

    all: Sequence[Endpoint]
    rules: Rules
    tried: Collection[Key] = ()
    room: Headroom = Headroom.FRESH
    tokens: int = 0  # of the prompt and the longest answer: a worker's context must hold them

    def left(self) -> list[Endpoint]:
        """Return the endpoints that remain, at least one.

        Raise NotServed, NoneRoutable, NoneReachable, AllTried, AllBusy or AllClosed.
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
        """Return whether an endpoint may take the request, even if others are better."""
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
        """Return whether there is room for one more request.

        The worker's own limit is never exceeded. Below it, each frontend may always fill its share of the cap. If requests wait
        at several frontends, none takes more than its share of the worker: otherwise a frontend that came late would wait for
        those that notice freed room first. The load check comes last: in an overload nearly all workers are full by the counts,
        and checking the KV blocks of each would take most of a frontend's time.
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
        """Return the error for the last stage that left any endpoint."""
        if not self.all:
            return NotServed()
        if not reachable:
            return NoneReachable() if any(one.routable for one in self.all) else NoneRoutable()
        return NoneRoutable() if any(one.key not in self.tried for one in reachable) else AllTried()


def cost(endpoint: Endpoint, external: Load | None) -> float:
    """Return a measure of how long a request would wait there: behind this frontend's requests, counted exactly, and others'.

    The total load that workers report is not compared. Reports are delayed, and all frontends would send to the worker with
    the oldest report.
    """
    active, tokens = endpoint.active + endpoint.kept.requests, endpoint.tokens
    if external is not None:
        active += external.running + external.waiting
        tokens += external.active_tokens
    weight = endpoint.weight
    return (active + 1 + tokens / TOKENS_PER_REQUEST) / (weight if weight > WEIGHT_MIN else WEIGHT_MIN)
