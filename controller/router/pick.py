"""Who gets the request? Filter, score, pick.

    filter   a model's seats, or those of one lineage: routable, reachable, not tried by this request, breaker, in-flight
             cap, which is for all frontends together; of those that are left, who was heard lately, if anybody was
    score    here, without regard to what is cached: (requests in flight + 1, and tokens) / weight: lower is better
    pick     the lowest; among equals the one that was picked longest ago

Every way to find nobody is an error of its own, because the client should be told different things. `modes` has the other
ways to score and pick among those that the filter leaves.
"""

from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass

import msgspec

from controller.router.table import Key, Seat
from events.errors import HoldfastError
from events.wire import Load

ROOM_LOOKS = 8  # at seats, for room, before all are looked at
WEIGHT_MIN = 1e-6  # a seat that may get nothing costs no more than what this does
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


class Everybody:
    """Whoever it is, he is among them."""

    def __contains__(self, key: object) -> bool:
        return True


EVERYBODY = Everybody()


@dataclass(frozen=True, slots=True)
class Rules:
    """What the filter and the score ask about a seat."""

    reachable: Callable[[str, str], bool]
    allowed: Callable[[Seat], bool]  # this frontend's own breaker
    others: Callable[[str], Load | None]  # what is in flight there that is not this frontend's
    cap: Callable[[Seat], int]  # requests in flight there, of all frontends
    frontends: Callable[[], int]  # how many serve now, this one included
    lately: Callable[[str, str], bool]  # reachable and heard: a preference, because everybody may be late
    doubted: Container[Key] = EVERYBODY  # whose breaker is not closed: `allowed` is asked of nobody else


class Picker:
    """Picks seats. Remembers nothing but whose turn it is."""

    def __init__(self) -> None:
        self._turn = 0
        self._place = 0  # of the first seat that was looked at last for room
        self._last: dict[Key, int] = {}

    def pick(
        self,
        seats: Sequence[Seat],
        rules: Rules,
        *,
        tried: Collection[Key] = (),
        capped: bool = True,
    ) -> Seat:
        """Return the best seat. Raise NotServed, NoneRoutable, NoneReachable, AllTried or AllBusy."""
        return self.best(Filter(seats, rules, tried, capped).left(), rules.others)

    def room(self, seats: Sequence[Seat], rules: Rules) -> Seat:
        """Return a seat with room for one request more: the best of a few that are next in turn, and of all only where none
        of these has room. Raise what `pick` raises."""
        among, size = Filter(seats, rules), len(seats)
        if size > ROOM_LOOKS:
            self._place = (self._place + ROOM_LOOKS) % size
            few: Sequence[Seat] = [seats[(self._place + n) % size] for n in range(ROOM_LOOKS)]
        else:
            few = seats
        for _, _, place in sorted(self._ranked(few, rules.others)):
            if among.fits(few[place]):  # most often the first: nobody else is looked at
                return self._taken(few[place])
        return self.best(among.left(), rules.others)

    def best(self, seats: Sequence[Seat], others: Callable[[str], Load | None]) -> Seat:
        """Return the best of some seats that the filter has left."""
        return self._taken(seats[min(self._ranked(seats, others))[2]])

    def _ranked(
        self, seats: Sequence[Seat], others: Callable[[str], Load | None]
    ) -> list[tuple[float, int, int]]:
        """Return each seat's cost, when it was picked last, and its place."""
        last, ranked = self._last, []
        for place, seat in enumerate(seats):
            ranked.append((cost(seat, others(seat.worker)), last.get(seat.key, 0), place))
        return ranked

    def _taken(self, seat: Seat) -> Seat:
        """Remember that it was this one's turn."""
        self._turn += 1
        self._last[seat.key] = self._turn
        return seat

    def forget(self, keys: Collection[Key]) -> None:
        """Drop the memory of seats that are gone; keep `keys`."""
        self._last = {key: turn for key, turn in self._last.items() if key in keys}


class Filter(msgspec.Struct, eq=False):  # each request makes two
    """Which of a model's seats may take one request? Together, or one by one: where the best is known before, one look at it
    is enough."""

    all: Sequence[Seat]
    rules: Rules
    tried: Collection[Key] = ()
    capped: bool = True
    among: int = 0  # frontends that serve now; 0: nobody had to know yet

    def left(self) -> list[Seat]:
        """Return all that are left, at least one. Raise what `Picker.pick` raises."""
        allowed = [seat for seat in self.all if self._allows(seat)]
        if not allowed:
            raise self._why_nobody()
        free = [seat for seat in allowed if self._has_room(seat)] if self.capped else allowed
        if not free:
            raise AllBusy
        lately = self.rules.lately
        return [seat for seat in free if lately(seat.worker, seat.instance)] or free

    def fits(self, seat: Seat) -> bool:
        """Say whether a seat would be left, and not for want of a better one."""
        rules, key = self.rules, seat.key
        return (
            seat.weight > 0.0
            and rules.lately(seat.worker, seat.instance)
            and key not in self.tried
            and (key not in rules.doubted or rules.allowed(seat))
            and (not self.capped or self._has_room(seat))
        )

    def _allows(self, seat: Seat) -> bool:
        rules = self.rules
        return (
            seat.weight > 0.0
            and rules.reachable(seat.worker, seat.instance)
            and seat.key not in self.tried
            and (seat.key not in rules.doubted or rules.allowed(seat))
        )

    def _has_room(self, seat: Seat) -> bool:
        """Say whether there is room for one request more. Each frontend may always fill its own share of the cap: one that
        came late would else wait for the others, who see first that something has ended."""
        own, rules = seat.active + seat.promised, self.rules
        cap = rules.cap(seat)
        if own >= cap:
            return False
        others = rules.others(seat.worker)
        if others is None or own + others.running + others.waiting < cap:
            return True
        among = self.among = self.among or rules.frontends()
        return among == 1 or own * among < cap

    def _why_nobody(self) -> NoWorker:
        """Return what is in the way of the last of them: so far they would have come."""
        if not self.all:
            return NotServed()
        routable = [seat for seat in self.all if seat.routable]
        if not routable:
            return NoneRoutable()
        reachable = [seat for seat in routable if self.rules.reachable(seat.worker, seat.instance)]
        if not reachable:
            return NoneReachable()
        return NoneRoutable() if any(seat.key not in self.tried for seat in reachable) else AllTried()


def cost(seat: Seat, others: Load | None) -> float:
    """Return how much a request would wait there: behind ours, which we know to the moment, and behind
    others'.

    The worker's report of everything is not simply compared with ours: it is older, and everyone would send
    to the worker whose last report happens to be the oldest.
    """
    active, tokens = seat.active + seat.promised, seat.tokens
    if others is not None:
        active += others.running + others.waiting
        tokens += others.active_tokens
    weight = seat.weight
    return (active + 1 + tokens / TOKENS_PER_REQUEST) / (weight if weight > WEIGHT_MIN else WEIGHT_MIN)
