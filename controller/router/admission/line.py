"""Who of those that wait is served next? A line for each tier; within a tier fairly between clients; and when a line is longer
than it should be, the newest first.

    head    the best tier in which anybody waits
            └── of it the client who has had the least work ── of his requests the oldest
                                                               └── while the tier is over its target: the newest
    over its target    the oldest of the tier has used up 0.9 of the time that it may wait, for 0.1 s on end (after CoDel)

Fair is by work, not by requests: each client's account goes up by what is taken for him, and who comes back after a while begins
where the others stand, not where he had left.

What a reader would get wrong: newest-first lets nobody in who would not have been. Who may wait is decided when he comes, as if
all were served in the order of their arrival; it only chooses who is late when workers are suddenly fewer: those who are anyway.
"""

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")

USED_UP = 0.9  # of the time that a request may wait
INTERVAL_S = 0.1
OWED_MAX = 4096  # clients that wait for nothing now, and had more than the others


class PlaceInLine(Generic[T]):
    """One request's place in the line."""

    __slots__ = ("client", "latest", "since", "tier", "who", "work")

    def __init__(self, who: T, tier: int, client: str, work: float, since: float, latest: float) -> None:
        """`tier`: 0 is the best. `work`: worker-seconds. `latest`: sent to a worker later, its first token comes too late."""
        self.who = who
        self.tier = tier
        self.client = client
        self.work = work
        self.since = since
        self.latest = latest


class _Client(Generic[T]):
    """What one client waits for in one tier."""

    __slots__ = ("had", "places", "work")

    def __init__(self, had: float) -> None:
        self.had = had  # the work that was taken for him, on the tier's account
        self.work = 0.0  # of all of these
        self.places: OrderedDict[PlaceInLine[T], None] = OrderedDict()


class _Tier(Generic[T]):
    """One tier's line."""

    def __init__(self) -> None:
        self.work = 0.0
        self.places: OrderedDict[PlaceInLine[T], None] = OrderedDict()  # in the order of their arrival
        self._clients: dict[str, _Client[T]] = {}  # those who wait
        self._owed: dict[str, float] = {}  # accounts of others that are ahead of this one
        self._stands = 0.0  # the account of the client who was served last
        self._turns: list[tuple[float, int, str]] = []  # a heap; what does not fit the accounts is void
        self._numbered = 0
        self._over_since: float | None = None

    def push(self, place: PlaceInLine[T]) -> None:
        client = self._clients.get(place.client)
        if client is None:
            had = max(self._owed.pop(place.client, 0.0), self._stands)
            client = self._clients[place.client] = _Client(had)
            self._turn(place.client, had)
        client.places[place] = None
        client.work += place.work
        self.places[place] = None
        self.work += place.work

    def head(self, now: float) -> PlaceInLine[T]:
        """Return who is next, of whom there is at least one."""
        newest = self._over(now)
        while True:
            had, _, name = self._turns[0]
            client = self._clients.get(name)
            if client is not None and client.had == had:
                return next(reversed(client.places) if newest else iter(client.places))
            heappop(self._turns)

    def served(self, place: PlaceInLine[T]) -> None:
        client = self._clients[place.client]
        self._stands = max(self._stands, client.had)
        client.had += place.work
        self._turn(place.client, client.had)
        self.remove(place)

    def remove(self, place: PlaceInLine[T]) -> None:
        client = self._clients[place.client]
        del client.places[place], self.places[place]
        client.work -= place.work
        self.work -= place.work
        if not client.places:
            del self._clients[place.client]
            if client.had > self._stands:
                self._owe(place.client, client.had)
        if not self.places:  # nobody has waited in vain: all begin anew
            self.work = self._stands = 0.0
            self._owed.clear()
            self._turns.clear()
            self._over_since = None

    def before(self, name: str) -> float:
        """Return the work that goes before the next request of this client: his own, and what others get meanwhile."""
        mine = self._clients.get(name)
        had = mine.had if mine is not None else max(self._owed.get(name, 0.0), self._stands)
        own = mine.work if mine is not None else 0.0
        until, before = had + own, own
        for other in self._clients.values():
            if other is not mine and other.had <= until:  # one request of his may be in its turn already
                before += min(other.work, until - other.had + other.work / len(other.places))
        return before

    def _over(self, now: float) -> bool:
        oldest = next(iter(self.places))
        used = (now - oldest.since) / max(oldest.latest - oldest.since, 1e-9)
        if used < USED_UP:
            self._over_since = None
            return False
        if self._over_since is None:
            self._over_since = now
        return now - self._over_since >= INTERVAL_S

    def _turn(self, name: str, had: float) -> None:
        self._numbered += 1
        heappush(self._turns, (had, self._numbered, name))

    def _owe(self, name: str, had: float) -> None:
        self._owed[name] = had
        if len(self._owed) > OWED_MAX:
            self._owed = {one: owed for one, owed in self._owed.items() if owed > self._stands}
            while len(self._owed) > OWED_MAX:
                del self._owed[next(iter(self._owed))]


class Line(Generic[T]):
    """All tiers' lines before the same workers."""

    def __init__(self) -> None:
        self._tiers: dict[int, _Tier[T]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[PlaceInLine[T]]:
        for rank in sorted(self._tiers):
            yield from self._tiers[rank].places

    def push(self, place: PlaceInLine[T]) -> None:
        """Let a request wait."""
        self._tiers.setdefault(place.tier, _Tier()).push(place)
        self._length += 1

    def head(self, now: float) -> PlaceInLine[T] | None:
        """Return who is next; None: nobody waits."""
        for rank in sorted(self._tiers):
            if (tier := self._tiers[rank]).places:
                return tier.head(now)
        return None

    def served(self, place: PlaceInLine[T]) -> None:
        """Take one out that is served: it goes onto its client's account."""
        self._tiers[place.tier].served(place)
        self._length -= 1

    def remove(self, place: PlaceInLine[T]) -> bool:
        """Take one out that is not. False: it does not wait."""
        tier = self._tiers.get(place.tier)
        if tier is None or place not in tier.places:
            return False
        tier.remove(place)
        self._length -= 1
        return True

    def before(self, tier: int, client: str) -> float:
        """Return how much work goes before the next request of this client in this tier. Seconds of a worker."""
        better = sum(self._tiers[rank].work for rank in self._tiers if rank < tier)
        own = self._tiers.get(tier)
        return better + (own.before(client) if own is not None else 0.0)
