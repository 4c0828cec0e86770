"""The admission queue: decides which waiting request is sent next.

Pure: requests are identified by numbers instead of futures, and the caller passes the time.

    push ──▶ in line ── it is next, and a worker has room ──▶ served ── no room there after all ──▶ sent back: pushed again
                 └── its time is over, or its client disconnects ──▶ removed

    next    sent-back requests, in order of their return; one that must wait does not block those behind it
            then the head of each line, taken from the best tier with requests:
                └── the client with the least work served ── its oldest request,
                                                          └── or its newest, while the tier is over its target
    over its target    for 0.1 s, the oldest request of the tier has used up 0.9 of its permitted waiting time (after CoDel)

With one tier, one client and no deadline, requests are served in order of arrival.

Fairness between clients is measured in work, not in requests: each client has an account, to which its served work is
added. A client that returns after a pause starts at the higher of two accounts: its own old account, and the account
of the client served last.

Serving the newest request first does not change which requests are admitted. On arrival, each request is judged as
if all requests were served in order of arrival. If capacity drops suddenly, some admitted requests must miss their
deadlines. With the newest served first, these are the requests that are already late.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from controller.router.endpoints import Key, Lineage
from controller.router.load.monitor import NOTHING, RequiredRoom

USED_UP = 0.9  # share of the permitted waiting time above which a tier is over its target
INTERVAL_S = 0.1
WINDOW_S = 10.0
ENDS_MAX = 512  # ended answers recorded per model; at a higher rate the window is shorter than WINDOW_S
OWED_MAX = 4096  # accounts kept of clients that have no waiting request and were served more than others


@dataclass(slots=True, eq=False, repr=False)
class QueuedRequest:
    """A request that waits for a worker, or may have to wait. All times and durations are in seconds."""

    served: str  # the model or adapter
    lineage: Lineage | None = None  # None: a worker of any lineage may serve it
    tier: int = 0  # 0 is the best
    client: str = ""
    work: float = 1.0  # in seconds of one worker; above 0 for a request in line
    since: float = 0.0  # time of its arrival
    latest: float = inf  # latest time to send the request so that its first token is in time
    sent_back: bool = False  # the request was admitted, but found no room at its worker
    deadline_s: float = inf  # from arrival to first token
    own_deadline: bool = False  # the client has set the deadline
    reading_s: float = 0.0  # prefill time of the uncached part of the prompt, by the worker's profile
    line_s: float = inf  # maximum time in line
    id: str = ""  # request id, if the client has set one
    wanted: RequiredRoom = NOTHING  # the room that it needs at a worker; NOTHING if not known yet
    without: Collection[Key] = ()  # endpoints that cannot serve it
    number: int = 0  # unique in its queue
    queued: bool = False

    def used_up(self, now: float) -> float:
        """Return which fraction of the permitted waiting time has passed; above 1 if the request waits longer."""
        return (now - self.since) / max(self.latest - self.since, 1e-9)


@dataclass(slots=True, eq=False, repr=False)
class _Client:
    """The waiting requests of one client in one tier, and the client's account of served work."""

    charged: float  # the account: work served, in seconds of one worker
    work: float = 0.0  # total work of its waiting requests
    requests: OrderedDict[int, QueuedRequest] = field(default_factory=OrderedDict)


class _Tier:
    """The waiting requests of one tier, ordered by the clients' accounts of served work, then by age."""

    def __init__(self) -> None:
        self.work = 0.0
        self.requests: OrderedDict[int, QueuedRequest] = OrderedDict()  # in order of arrival
        self._clients: dict[str, _Client] = {}  # clients with waiting requests
        # accounts of clients without waiting requests, where these exceed `_virtual_time`
        self._owed: dict[str, float] = {}
        self._virtual_time = 0.0  # the account of the client served last
        # a heap of (account, number, client); an entry is void if the client's account has changed since
        self._turns: list[tuple[float, int, str]] = []
        self._numbered = 0
        self._over_since: float | None = None

    def push(self, request: QueuedRequest) -> None:
        client = self._clients.get(request.client)
        if client is None:
            charged = max(self._owed.pop(request.client, 0.0), self._virtual_time)
            client = self._clients[request.client] = _Client(charged)
            self._turn(request.client, charged)
        client.requests[request.number] = self.requests[request.number] = request
        client.work += request.work
        self.work += request.work

    def head(self, now: float) -> QueuedRequest:
        """Return the next request to serve. The tier must not be empty."""
        newest = self._over_target(now)
        while True:
            charged, _, name = self._turns[0]
            client = self._clients.get(name)
            if client is not None and client.charged == charged:
                requests = client.requests
                return requests[next(reversed(requests) if newest else iter(requests))]
            heappop(self._turns)

    def remove(self, request: QueuedRequest, *, served: bool) -> None:
        client = self._clients[request.client]
        if served:
            self._virtual_time = max(self._virtual_time, client.charged)
            client.charged += request.work
            self._turn(request.client, client.charged)
        del client.requests[request.number], self.requests[request.number]
        client.work -= request.work
        self.work -= request.work
        if not client.requests:
            del self._clients[request.client]
            if client.charged > self._virtual_time:
                self._owe(request.client, client.charged)
        if not self.requests:  # all clients start with equal accounts again
            self.work = self._virtual_time = 0.0
            self._owed.clear()
            self._turns.clear()
            self._over_since = None

    def before(self, name: str) -> float:
        """Return the work to be served before a new request of the client `name`, in seconds of one worker's time.

        The result is the client's own waiting work, plus the work of other clients that is served meanwhile.
        """
        mine = self._clients.get(name)
        charged = mine.charged if mine is not None else max(self._owed.get(name, 0.0), self._virtual_time)
        own = mine.work if mine is not None else 0.0
        until, before = charged + own, own
        for other in self._clients.values():
            if other is not mine and other.charged <= until:  # a request of this client may be served first
                before += min(other.work, until - other.charged + other.work / len(other.requests))
        return before

    def _over_target(self, now: float) -> bool:
        if next(iter(self.requests.values())).used_up(now) < USED_UP:
            self._over_since = None
            return False
        if self._over_since is None:
            self._over_since = now
        return now - self._over_since >= INTERVAL_S

    def _turn(self, name: str, charged: float) -> None:
        self._numbered += 1
        heappush(self._turns, (charged, self._numbered, name))

    def _owe(self, name: str, charged: float) -> None:
        self._owed[name] = charged
        if len(self._owed) > OWED_MAX:
            self._owed = {one: owed for one, owed in self._owed.items() if owed > self._virtual_time}
            while len(self._owed) > OWED_MAX:
                del self._owed[next(iter(self._owed))]


class Line:
    """The queued requests, of all tiers, that wait for the same group of workers."""

    def __init__(self) -> None:
        self._tiers: dict[int, _Tier] = {}

    def __len__(self) -> int:
        return sum(len(tier.requests) for tier in self._tiers.values())

    def __iter__(self) -> Iterator[QueuedRequest]:
        for rank in sorted(self._tiers):
            yield from self._tiers[rank].requests.values()

    def push(self, request: QueuedRequest) -> None:
        """Add a request to the queued requests of the same tier and client."""
        self._tiers.setdefault(request.tier, _Tier()).push(request)
        request.queued = True

    def head(self, now: float) -> QueuedRequest | None:
        """Return the next request to serve, or None if no request waits in this line."""
        for rank in sorted(self._tiers):
            if (tier := self._tiers[rank]).requests:
                return tier.head(now)
        return None

    def oldest(self) -> int:
        """Return the lowest number of a request in this line. The line must not be empty."""
        firsts: list[int] = [next(iter(tier.requests)) for tier in self._tiers.values() if tier.requests]
        return min(firsts)

    def remove(self, request: QueuedRequest, *, served: bool = False) -> None:
        """Remove a request from this line, or do nothing if the request is not queued.

        If `served` is true, the request's work is charged to the account of the request's client.
        """
        if request.queued:
            self._tiers[request.tier].remove(request, served=served)
            request.queued = False

    def before(self, tier: int, client: str) -> float:
        """Return the work to be served before a new request of this tier and client, in seconds of one worker's time."""
        better = sum(self._tiers[rank].work for rank in self._tiers if rank < tier)
        own = self._tiers.get(tier)
        return better + (own.before(client) if own is not None else 0.0)


class Queue:
    """All queued requests of a frontend, in one waiting line per served name and lineage (model revision and tokenizer).

    A served name is that of a model or adapter. Each has one more line for sent-back requests. They were admitted, but no
    worker had room when they were to be sent.
    """

    def __init__(
        self,
        requests_max: float = inf,
        line: type[Line] = Line,
        model_of: Callable[[str], str] = lambda served: served,
    ) -> None:
        """Limit the waiting lines of each served name to `requests_max` requests in total.

        `model_of` returns the model of an adapter.

        Sent-back requests, which were admitted before, do not count and are always queued. `line` is the class of the
        lines, which the simulator replaces.
        """
        self._max, self._model_of = requests_max, model_of
        self._lines: dict[str, dict[Lineage | None, Line]] = defaultdict(lambda: defaultdict(line))
        self._back: dict[str, Line] = defaultdict(line)  # in order of their return

    def names(self) -> list[str]:
        """Return the models and adapters for which requests wait or have waited."""
        return [*self._lines | self._back]

    def line(self, served: str, lineage: Lineage | None = None) -> Line:
        """Return the waiting line of a model for workers of this lineage (model revision and tokenizer).

        If `lineage` is None, return the line for workers of any lineage.
        """
        return self._lines[served][lineage]

    def lines(self, served: str) -> list[Line]:
        """Return all waiting lines of a model except the line of sent-back requests, which were admitted before."""
        return [*self._lines.get(served, {}).values()]

    def line_of(self, request: QueuedRequest) -> Line:
        """Return the waiting line in which a request waits or would wait."""
        served = request.served
        return self._back[served] if request.sent_back else self._lines[served][request.lineage]

    def sent_back(self, served: str) -> list[QueuedRequest]:
        """Return a model's sent-back requests, in the order in which they came back.

        These requests were admitted, but no worker had room when they were to be sent.
        """
        return [*self._back.get(served, ())]

    def in_line(self, served: str) -> int:
        """Return the number of a model's queued requests that were not admitted before."""
        return sum(map(len, self._lines[served].values())) if served in self._lines else 0

    def length(self, served: str) -> int:
        """Return the number of all queued requests of a model, including admitted requests that were queued again."""
        return self.in_line(served) + len(self._back.get(served, ()))

    def waiting_with(self, served: str | None) -> list[str]:
        """Return the names with queued requests that have the same model as `served`, the one of the oldest request first.

        If `served` is None, return all names with queued requests.
        """
        names = [name for name in self.names() if self.length(name)]
        if served is not None:
            names = [name for name in names if self._model_of(name) == self._model_of(served)]
        return sorted(names, key=self._oldest) if len(names) > 1 else names

    def _oldest(self, served: str) -> int:
        lines = self.lines(served)
        if served in self._back:
            lines.append(self._back[served])
        return min(line.oldest() for line in lines if len(line))

    def queued(self, model: str) -> int:
        """Return the number of queued requests to a model, with and without adapters."""
        return self.waiting().get(model, 0)

    def waiting(self) -> dict[str, int]:
        """Return the number of queued requests by model, with and without adapters. Models without any are left out."""
        found = Counter[str]()
        for served in self.names():
            if count := self.length(served):
                found[self._model_of(served)] += count
        return dict(found)

    def keep(self, served: Collection[str]) -> None:
        """Drop the empty lines of all models and adapters that are not in `served`."""
        for name in [name for name in self.names() if name not in served and not self.length(name)]:
            self._lines.pop(name, None)
            self._back.pop(name, None)

    def full(self, served: str) -> bool:
        """Return whether the number of a model's queued requests has reached the limit.

        Requests that were admitted before do not count.
        """
        return self.in_line(served) >= self._max


class EndRate:
    """Measures how often answers of each model end, to predict how long a queued request waits."""

    def __init__(self) -> None:
        self._ends: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=ENDS_MAX))

    def ended(self, model: str, now: float) -> None:
        """Record that an answer has ended and has freed its batch slot."""
        self._ends[model].append(now)

    def wait_s(self, model: str, before: int, now: float) -> float:
        """Return the seconds until a request behind `before` others gets a slot, or inf if no answer has ended recently."""
        ends = self._ends.get(model, deque[float]())
        while ends and ends[0] < now - WINDOW_S:
            ends.popleft()
        if not ends:
            return inf
        took_s = max(now - ends[0], 1.0) if len(ends) == ENDS_MAX else WINDOW_S
        return (before + 1) * took_s / len(ends)
