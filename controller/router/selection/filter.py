"""Who gets the request? Filter, score, pick.

    filter   a model's endpoints, or those of one lineage: routable, reachable, not tried by this request, breaker, room, which
             is for all frontends together (`Headroom`); of those that are left, who was heard lately, if anybody was
    score    here, without regard to what is cached: (requests in flight + 1, and tokens) / weight: lower is better
    pick     the lowest; among equals the one that was picked longest ago

Every way to find nobody is an error of its own, because the client should be told different things. `strategies` has the other
ways to score and pick among those that the filter leaves.
"""

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from controller.router.endpoints import Endpoint, Key
from events.errors import HoldfastError
from events.wire import Load

ROOM_LOOKS = 8  # at endpoints, for room, before all are looked at
WEIGHT_MIN = 1e-6  # an endpoint that may get nothing costs no more than what this does
TOKENS_PER_REQUEST = 4096  # so many tokens in flight weigh as much as one more request


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

    FRESH = (
        "fresh"  # for one that begins: below the frontends' cap, and below what the worker says it can hold
    )
    HELD = "held"  # for one that has begun: below what the worker says it can hold
    NONE = "none"  # however full it is: nothing is sent


_HELD, _NONE = Headroom.HELD, Headroom.NONE  # to look a member of an enum up takes as long as a call


class Everybody:
    """Whoever it is, he is among them."""

    def __contains__(self, key: object) -> bool:
        return True


EVERYBODY = Everybody()


@dataclass(frozen=True, slots=True)
class Rules:
    """What the filter and the score ask about an endpoint."""

    reachable: Callable[[str, str], bool]
    allowed: Callable[[Endpoint], bool]  # this frontend's own breaker
    external_load: Callable[[str], Load | None]  # what is in flight there that is not this frontend's
    cap: Callable[[Endpoint], int]  # requests in flight there, of all frontends
    frontends: Callable[[], int]  # how many serve now, this one included
    recently_heard: Callable[
        [str, str], bool
    ]  # reachable and heard: a preference, because everybody may be late
    doubted: Container[Key] = EVERYBODY  # whose breaker is not closed: `allowed` is asked of nobody else
    contenders: Mapping[str, int] = field(
        default_factory=dict
    )  # of models for which others' requests wait: who shares
    has_enough: Callable[[Endpoint], bool] = lambda endpoint: False  # to do, with fewer requests than the cap


class Picker:
    """Picks endpoints. Remembers nothing but whose turn it is."""

    def __init__(self) -> None:
        self._turn = 0
        self._looked_at = 0  # of the first endpoint that was looked at last for room
        self._last: dict[Key, int] = {}

    def pick(
        self,
        endpoints: Sequence[Endpoint],
        rules: Rules,
        *,
        tried: Collection[Key] = (),
        room: Headroom = Headroom.FRESH,
    ) -> Endpoint:
        """Return the best endpoint. Raise NotServed, NoneRoutable, NoneReachable, AllTried or AllBusy."""
        return self.best(Filter(endpoints, rules, tried, room).left(), rules.external_load)

    def room(self, endpoints: Sequence[Endpoint], rules: Rules) -> Endpoint:
        """Return an endpoint with room for one request more: the best of a few that are next in turn, and of all only where none
        of these has room. Raise what `pick` raises."""
        among, size = Filter(endpoints, rules), len(endpoints)
        if size > ROOM_LOOKS:
            self._looked_at = (self._looked_at + ROOM_LOOKS) % size
            few: Sequence[Endpoint] = [endpoints[(self._looked_at + n) % size] for n in range(ROOM_LOOKS)]
        else:
            few = endpoints
        for _, _, index in sorted(self._ranked(few, rules.external_load)):
            if among.fits(few[index]):  # most often the first: nobody else is looked at
                return self._taken(few[index])
        return self.best(among.left(), rules.external_load)

    def best(self, endpoints: Sequence[Endpoint], external_load: Callable[[str], Load | None]) -> Endpoint:
        """Return the best of some endpoints that the filter has left."""
        return self._taken(endpoints[min(self._ranked(endpoints, external_load))[2]])

    def _ranked(
        self, endpoints: Sequence[Endpoint], external_load: Callable[[str], Load | None]
    ) -> list[tuple[float, int, int]]:
        """Return each endpoint's cost, when it was picked last, and its index."""
        last, ranked = self._last, []
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


class Filter(msgspec.Struct, eq=False):  # each request makes two
    """Which of a model's endpoints may take one request? Together, or one by one: where the best is known before, one look at it
    is enough."""

    all: Sequence[Endpoint]
    rules: Rules
    tried: Collection[Key] = ()
    room: Headroom = Headroom.FRESH
    among: int = 0  # frontends that serve now; 0: nobody had to know yet
    tokens: int = 0  # of the prompt and the longest answer: a worker's context must hold them

    def left(self) -> list[Endpoint]:
        """Return all that are left, at least one. Raise NotServed, NoneRoutable, NoneReachable, AllTried or AllBusy."""
        allowed = [endpoint for endpoint in self.all if self._allows(endpoint)]
        if not allowed:
            raise self._why_nobody()
        free = allowed if self.room is _NONE else [each for each in allowed if self.has_room(each)]
        if not free:
            raise self._why_no_room(allowed)
        recently_heard = self.rules.recently_heard
        return [endpoint for endpoint in free if recently_heard(endpoint.worker, endpoint.instance)] or free

    def fits(self, endpoint: Endpoint) -> bool:
        """Say whether an endpoint would be left, and not for want of a better one."""
        rules, key = self.rules, endpoint.key
        return (
            endpoint.weight > 0.0
            and rules.recently_heard(endpoint.worker, endpoint.instance)
            and key not in self.tried
            and endpoint.context_tokens >= self.tokens
            and (key not in rules.doubted or rules.allowed(endpoint))
            and (self.room is _NONE or self.has_room(endpoint))
        )

    def _allows(self, endpoint: Endpoint) -> bool:
        rules = self.rules
        return (
            endpoint.weight > 0.0
            and rules.reachable(endpoint.worker, endpoint.instance)
            and endpoint.key not in self.tried
            and endpoint.context_tokens >= self.tokens
            and (endpoint.key not in rules.doubted or rules.allowed(endpoint))
        )

    def has_room(self, endpoint: Endpoint) -> bool:
        """Say whether there is room for one request more.

        What the worker can hold is never passed. Below that each frontend may always fill its own share of the cap, and where
        others' requests wait, too, none takes more than its share of the worker: one that came late would else wait for the
        others, who see first that something has ended. Whether so few are enough is asked last: in an overload nearly all are
        full by the counts, and a look at each one's KV blocks would take most of a frontend's time.
        """
        own, rules, holds = endpoint.active + endpoint.kept.requests, self.rules, endpoint.holds
        external = rules.external_load(endpoint.worker)
        there = own if external is None else own + external.running + external.waiting
        if there >= holds:
            return False
        if external is not None and (external is endpoint.refused_at or external.closed_s):
            return False
        if self.room is _HELD:
            return True
        cap = rules.cap(endpoint)
        if own >= cap:
            return False
        if rules.contenders and own * rules.contenders.get(endpoint.model, 1) >= holds:
            return False
        if there >= cap:
            among = self.among = self.among or rules.frontends()
            if among > 1 and own * among >= cap:
                return False
        return not rules.has_enough(endpoint)

    def _why_no_room(self, allowed: Sequence[Endpoint]) -> NoWorker:
        """Return why none of these has room: each is closed by the server behind it, or some are full."""
        loads = [self.rules.external_load(endpoint.worker) for endpoint in allowed]
        wait_s = min(0.0 if load is None else load.closed_s for load in loads)
        return AllClosed(wait_s) if wait_s else AllBusy()

    def _why_nobody(self) -> NoWorker:
        """Return what is in the way of the last of them: so far they would have come."""
        if not self.all:
            return NotServed()
        routable = [endpoint for endpoint in self.all if endpoint.routable]
        if not routable:
            return NoneRoutable()
        reachable = [
            endpoint for endpoint in routable if self.rules.reachable(endpoint.worker, endpoint.instance)
        ]
        if not reachable:
            return NoneReachable()
        return NoneRoutable() if any(endpoint.key not in self.tried for endpoint in reachable) else AllTried()


def cost(endpoint: Endpoint, external: Load | None) -> float:
    """Return how much a request would wait there: behind ours, which we know to the moment, and behind
    others'.

    The worker's report of everything is not simply compared with ours: it is older, and everyone would send
    to the worker whose last report happens to be the oldest.
    """
    active, tokens = endpoint.active + endpoint.kept.requests, endpoint.tokens
    if external is not None:
        active += external.running + external.waiting
        tokens += external.active_tokens
    weight = endpoint.weight
    return (active + 1 + tokens / TOKENS_PER_REQUEST) / (weight if weight > WEIGHT_MIN else WEIGHT_MIN)
