"""The admission queue: decides which waiting request is sent next.

Pure: requests are identified by numbers instead of futures, and the caller passes the time.

    push ──▶ in line ── it is next, and a worker has room ──▶ served ── no room there after all ──▶ sent back: pushed again
                 └── its time is over, or its client disconnects ──▶ removed

    next    sent-back requests, in order of their return; each may be bound to some workers, so none of them blocks another
            then the head of each line, taken from the best tier with requests:
                └── the client with the least work served ── its oldest request,
                                                          └── or its newest, while the tier is over its target
    over its target    for 0.1 s, the oldest request of the tier has used up 0.9 of its permitted waiting time (after CoDel)

With one tier, one client and no deadline, requests are served in order of arrival.

Fairness between clients is measured in work, not in requests: each client has an account, to which its served work is
added. A client that returns after a pause starts at the account of the client served last, not at its own old
account.

Serving the newest request first does not admit requests that would otherwise be refused, because each request is
judged on arrival as if all were served in order of arrival. If capacity drops suddenly, serving the newest first only
decides which requests miss their deadline: those that are already late.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from controller.router.endpoints import Lineage

USED_UP = 0.9  # share of the permitted waiting time above which a tier is over its target
INTERVAL_S = 0.1
WINDOW_S = 10.0
ENDS_MAX = 512  # ended answers recorded per model; at a higher rate the window is shorter than WINDOW_S
OWED_MAX = 4096  # accounts kept of clients that have no waiting request and were served more than others


@dataclass(slots=True, eq=False, repr=False)
class QueuedRequest:
    """A request that waits for a worker, or is about to. All times and durations are in seconds."""

    model: str
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
    number: int = 0  # unique in its queue
    queued: bool = False

    def used_up(self, now: float) -> float:
        """Return the share of the permitted waiting time that has passed."""
        return (now - self.since) / max(self.latest - self.since, 1e-9)


@dataclass(slots=True, eq=False, repr=False)
class _Client:
    """The waiting requests of one client in one tier, and the client's account."""

    charged: float  # the account: work served, in seconds of one worker
    work: float = 0.0  # total work of its waiting requests
    requests: OrderedDict[int, QueuedRequest] = field(default_factory=OrderedDict)


class _Tier:
    """The waiting requests of one tier, ordered by client account and by age."""

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
        """Return the work that is served before a new request of this client, in seconds of one worker.

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
    """The requests that wait for the same workers, of all tiers."""

    def __init__(self) -> None:
        self._tiers: dict[int, _Tier] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[QueuedRequest]:
        for rank in sorted(self._tiers):
            yield from self._tiers[rank].requests.values()

    def push(self, request: QueuedRequest) -> None:
        """Add a request at its tier and client."""
        self._tiers.setdefault(request.tier, _Tier()).push(request)
        self._length += 1
        request.queued = True

    def head(self, now: float) -> QueuedRequest | None:
        """Return the next request to serve, or None if the line is empty."""
        for rank in sorted(self._tiers):
            if (tier := self._tiers[rank]).requests:
                return tier.head(now)
        return None

    def remove(self, request: QueuedRequest, *, served: bool = False) -> None:
        """Remove a request from the line, or do nothing if the request is not queued.

        `served` charges its work to its client.
        """
        if request.queued:
            self._tiers[request.tier].remove(request, served=served)
            self._length -= 1
            request.queued = False

    def before(self, tier: int, client: str) -> float:
        """Return the work that is served before a new request of this client in this tier, in seconds of one worker."""
        better = sum(self._tiers[rank].work for rank in self._tiers if rank < tier)
        own = self._tiers.get(tier)
        return better + (own.before(client) if own is not None else 0.0)


class Queue:
    """All waiting requests of a frontend: one line per model and lineage, and one line per model for sent-back requests."""

    def __init__(self, requests_max: float = inf, line: type[Line] = Line) -> None:
        """Limit all lines of one model to `requests_max` requests in total.

        Sent-back requests are queued beyond this limit.
        """
        self._max = requests_max
        self._lines: dict[str, dict[Lineage | None, Line]] = defaultdict(lambda: defaultdict(line))
        self._back: dict[str, Line] = defaultdict(line)  # in order of their return

    def models(self) -> list[str]:
        """Return the models for which requests wait or have waited."""
        return [*self._lines | self._back]

    def line(self, model: str, lineage: Lineage | None = None) -> Line:
        """Return the line for a model's workers of this lineage, or for workers of any lineage if `lineage` is None."""
        return self._lines[model][lineage]

    def lines(self, model: str) -> list[Line]:
        """Return all lines of a model, without the line of sent-back requests."""
        return [*self._lines.get(model, {}).values()]

    def line_of(self, request: QueuedRequest) -> Line:
        """Return the line in which a request waits or would wait."""
        model = request.model
        return self._back[model] if request.sent_back else self._lines[model][request.lineage]

    def sent_back(self, model: str) -> list[QueuedRequest]:
        """Return the sent-back requests of a model, in order of their return."""
        return [*self._back.get(model, ())]

    def in_line(self, model: str) -> int:
        """Return the number of requests in a model's lines, without sent-back requests."""
        return sum(map(len, self._lines[model].values())) if model in self._lines else 0

    def length(self, model: str) -> int:
        """Return the number of requests that wait for a worker of this model, with sent-back requests."""
        return self.in_line(model) + len(self._back.get(model, ()))

    def waiting(self) -> dict[str, int]:
        """Return the number of waiting requests of each model that has waiting requests."""
        return {model: count for model in self.models() if (count := self.length(model))}

    def full(self, model: str) -> bool:
        """Return whether the lines of this model have reached the limit of the queue."""
        return self.in_line(model) >= self._max


class EndRate:
    """Measures how often answers of each model end, to predict how long a queued request waits."""

    def __init__(self) -> None:
        self._ends: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=ENDS_MAX))

    def ended(self, model: str, now: float) -> None:
        """Record that a started answer has ended, which frees a slot."""
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
