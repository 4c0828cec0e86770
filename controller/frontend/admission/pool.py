"""Predicts the queueing time of a request at a worker pool, and decides whether the request may wait.

A pool is the workers of one model and lineage (model revision and tokenizer). All computations are pure: the caller
passes the time.

    wait           (work in line before the request + half of its own work)
                   / (rate of the line - rate at which work of better tiers arrives)
    first token    wait + the time that a worker then needs (`FirstTokens`)
    admitted       if the first token is predicted within the margin, a share of the deadline (predictions are inexact)
    rate           capacity x efficiency    capacity: the sum of the weights of the workers in service
                                            efficiency: work served / (capacity x time in which requests waited), recently

Times are in seconds. Work is measured in seconds of one worker's time, and a rate is work per second.

The margin of a tier starts at 0.8, or at 1 for the best tier, because no other tier overtakes the best one. Each
request that times out in line lowers the margin by a tenth. Each request that is served from the line raises the
margin by 0.001. The two balance when about one request in a hundred times out.

The efficiency is measured only while requests wait, because workers are not fully loaded at other times. While no
request waits, the efficiency slowly returns to the initial estimate, so that a short slowdown cannot stop admission
forever. If a worker fails, the rate drops at once, because the worker's weight leaves the capacity.

If a client has set a deadline that not even an idle worker could meet, its request is refused. A default deadline of
the tier or model is at least twice the time to first token on an idle worker (`ALONE_TIMES`); a shorter one is extended.
"""

from collections import OrderedDict
from dataclasses import dataclass
from math import exp, inf

from controller.frontend.admission.queue import Line, QueuedRequest
from controller.router.load.work import FirstTokens

WINDOW_S = 10.0  # time constant in seconds: the weight of past work falls by a factor of e in this time
PRIOR_S = 1.0  # the initial estimate weighs as much as a measurement over this many seconds
FADES_S = 30.0  # time constant of the decay towards the initial estimate while no request waits
LEAST, MOST = 0.02, 8.0  # bounds of the efficiency: values outside do not describe the workers
MARGIN, MARGIN_MIN, MARGIN_MAX = 0.8, 0.2, 1.0  # initial, least and largest share of the deadline
LATE_TIMES = 0.9  # factor on the margin for each request that times out in line
SERVED_MORE = 0.001  # added to the margin for each request that is served
ALONE_TIMES = 2.0  # a default deadline is at least this many times the time to first token on an idle worker
REPEATS_LEAST = 3.0  # number of retries that are always allowed per window
IDS_MAX = 8192  # number of ids of refused requests that are remembered
IDS_S = 120.0  # seconds for which the id of a refused request is remembered


class DrainRate:
    """Measures the efficiency of a worker pool: the served work divided by the possible work.

    The possible work is what the pool's capacity could have served while requests waited.
    """

    def __init__(self, now: float, efficiency: float = 1.0) -> None:
        """Start with `efficiency` as the initial estimate."""
        self._at = now
        self._guess = efficiency
        self._served_work = efficiency * PRIOR_S
        self._possible_work = PRIOR_S
        self.efficiency = efficiency

    def pass_time(self, now: float, capacity: float, *, waited: bool) -> None:
        """Advance the measurement to `now`.

        `waited` states whether requests waited during all the time since the last call.
        """
        passed = max(0.0, now - self._at)
        self._at = now
        if passed <= 0.0:
            return
        if waited:
            fades = exp(-passed / WINDOW_S)
            self._served_work *= fades
            self._possible_work = self._possible_work * fades + passed * capacity
        else:
            fades = exp(-passed / FADES_S)
            self._served_work = self._served_work * fades + self._guess * PRIOR_S * (1.0 - fades)
            self._possible_work = self._possible_work * fades + PRIOR_S * (1.0 - fades)
        if self._possible_work > 0.0:
            self.efficiency = min(MOST, max(LEAST, self._served_work / self._possible_work))

    def take(self, work: float) -> None:
        """Add served work, measured in seconds of one worker's time."""
        self._served_work += work

    def rate(self, capacity: float) -> float:
        """Return the work served per second at this capacity while requests wait."""
        return capacity * self.efficiency


class Inflow:
    """Measures the rate at which work arrives, as an exponentially weighted mean over WINDOW_S."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._at = 0.0

    def add(self, work: float, now: float) -> None:
        """Add work that has arrived, measured in seconds of one worker's time."""
        self._sum = self._faded(now) + work
        self._at = max(now, self._at)

    def rate(self, now: float) -> float:
        """Return the work that arrives per second."""
        return self._faded(now) / WINDOW_S

    def _faded(self, now: float) -> float:
        return self._sum * exp(-max(0.0, now - self._at) / WINDOW_S)


@dataclass(frozen=True, slots=True)
class AdmissionVerdict:
    """The decision whether a request may wait, with the predicted times in seconds."""

    reason: str  # reason for a refusal; empty if the request may wait
    wait_s: float  # predicted wait in line
    first_s: float  # predicted time from arrival to first token
    deadline_s: float  # the deadline that applies to the request
    # seconds from arrival within which the request must be sent so that its first token is in time
    latest_s: float
    # whether the first token would be in time if a worker accepted the request now
    in_time_with_room: bool = True


class WorkerPool:
    """Predicts waiting times and decides admission for the workers of one model and lineage.

    A lineage is a model revision and a tokenizer. The pool reads the line of requests that wait for these workers. Only
    `Queue` modifies the line.
    """

    def __init__(self, line: Line, first: FirstTokens, now: float, efficiency: float = 1.0) -> None:
        self.line = line
        self.first = first
        self.capacity = 0.0  # sum of the weights of the pool's workers in service
        self.capacity_until = 0.0  # time from which the capacity must be computed again
        self._drain = DrainRate(now, efficiency)
        self._inflow: dict[int, Inflow] = {}
        self._margins: dict[int, float] = {}  # by tier

    def pass_time(self, now: float) -> None:
        """Update the measured service rate to the time `now`.

        Must be called before the line of queued requests changes, and before the pool is queried.
        """
        self._drain.pass_time(now, self.capacity, waited=len(self.line) > 0)

    def wait_s(self, request: QueuedRequest, now: float, capacity: float) -> float:
        """Return the seconds that a request would wait behind the queued requests, or inf if the pool has no capacity.

        Requests of better tiers are assumed to use at most 95 % of the service rate.
        """
        better = sum(flow.rate(now) for tier, flow in self._inflow.items() if tier < request.tier)
        rate = self._drain.rate(capacity)
        left = rate - min(better, 0.95 * rate)
        before = self.line.before(request.tier, request.client) + request.work / 2
        return before / left if left > 0 else inf

    def judge(
        self, request: QueuedRequest, now: float, capacity: float, step_s: float, *, room: bool
    ) -> AdmissionVerdict:
        """Decide whether a request is admitted.

        `room` states that a worker would accept the request at once and that no other request waits. `step_s` is the
        duration of one engine step in seconds.
        """
        waited_s, deadline_s = now - request.since, request.deadline_s
        alone_s = self.first.alone_s(request.reading_s, step_s)
        if not request.own_deadline:
            deadline_s = max(deadline_s, ALONE_TIMES * alone_s)
        wait_s = 0.0 if room else self.wait_s(request, now, capacity)
        usual_s = alone_s if room else self.first.usual_s(request.reading_s, step_s)
        first_s, reason = waited_s + wait_s + usual_s, ""
        in_time = waited_s + alone_s <= deadline_s
        if not in_time:
            reason = "deadline_unattainable" if alone_s > request.deadline_s else "deadline"
        elif not room and (first_s > self.margin(request.tier) * deadline_s or wait_s > request.line_s):
            reason = "deadline"
        return AdmissionVerdict(reason, wait_s, first_s, deadline_s, deadline_s - usual_s, in_time)

    def margin(self, tier: int) -> float:
        """Return the margin of a tier: a share of the deadline.

        A request may wait only if its first token is predicted to arrive within this share of its deadline.
        """
        return self._margins.get(tier, MARGIN_MAX if tier == 0 else MARGIN)

    def arrived(self, request: QueuedRequest, now: float) -> None:
        """Add the work of a new request to the arrival rate of the request's tier.

        Called for each request that is admitted at once, and for each request that is queued.
        """
        self._inflow.setdefault(request.tier, Inflow()).add(request.work, now)

    def served(self, request: QueuedRequest) -> None:
        """Record that a queued request gets a worker: its work counts as served, and its tier's margin rises.

        A higher margin admits requests with a predicted first token closer to their deadlines.
        """
        self._drain.take(request.work)
        self._margins[request.tier] = min(MARGIN_MAX, self.margin(request.tier) + SERVED_MORE)

    def timed_out(self, request: QueuedRequest) -> None:
        """Lower the margin of a request's tier, because the request waited until its deadline was out of reach."""
        self._margins[request.tier] = max(MARGIN_MIN, self.margin(request.tier) * LATE_TIMES)


class RetryBudget:
    """Limits how many of one model's requests may be retries of refused requests.

    In an overload, each retry of a refused request adds load. If clients retry each request up to twice, an overload
    of factor 2 can grow to almost factor 6.

    retry       the client marks the request (`X-Stainless-Retry-Count` of OpenAI's client), or its id was refused lately
    too many    more retries in the last 10 s than `REPEATS_LEAST`, and more than `retry_budget` times the other requests

    The limit follows Envoy's retry budget.
    """

    def __init__(self, share: float) -> None:
        """Permit `share` times as many retries as other requests, but always at least REPEATS_LEAST retries."""
        self._share = share
        self._fresh, self._again = Inflow(), Inflow()

    def used_up(self, now: float) -> bool:
        """Return whether one more retry would exceed the budget."""
        fresh, again = self._fresh.rate(now) * WINDOW_S, self._again.rate(now) * WINDOW_S
        return again + 1.0 > max(REPEATS_LEAST, self._share * fresh)

    def note(self, now: float, *, repeat: bool) -> None:
        """Count a request that the budget did not refuse. `repeat` states that the request is a retry of a refused one."""
        (self._again if repeat else self._fresh).add(1.0, now)


class RefusedIds:
    """Remembers the client-set ids of recently refused requests, so that a retry is recognized. Bounded."""

    def __init__(self) -> None:
        self._at: OrderedDict[str, float] = OrderedDict()

    def add(self, id: str, now: float) -> None:
        """Record the id of a refused request. An empty id is ignored."""
        if id:
            self._at.pop(id, None)
            self._at[id] = now
            if len(self._at) > IDS_MAX:
                self._at.popitem(last=False)

    def recently_refused(self, id: str, now: float) -> bool:
        """Return whether a request with this id was refused in the last IDS_S seconds."""
        at = self._at.get(id)
        return at is not None and now - at <= IDS_S
