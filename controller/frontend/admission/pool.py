"""Predicts the queueing time of a request at a worker pool, and decides whether it may wait. Pure.

A pool is the workers of one model and lineage.

    wait           (work before it + half of its own) / (rate of the line - rate at which work of better tiers arrives)
    first token    wait + the time that a worker then needs (`FirstTokens`)
    admitted       if the first token is within the margin: a part of the deadline, because predictions are inexact
    rate           capacity x efficiency    capacity: the weights of the workers in service
                                            efficiency: work served / (capacity x time in which requests waited), recently

The margin starts at 0.8 (1 in the best tier, which no request overtakes). It shrinks with each request that times out in line
and grows with each that does not. So in each tier about one request in a hundred times out.

The efficiency is measured only while requests wait: at other times workers are not fully loaded. It decays slowly towards the
initial estimate, so that a short slowdown cannot stop admission forever. A worker that fails reduces the rate at once.

If the client has set a deadline that not even an idle worker could meet, the request is refused. If the deadline is only the
default of the tier or model, a long prompt may take twice the time of its prefill on an idle worker.
"""

from collections import OrderedDict
from dataclasses import dataclass
from math import exp, inf

from controller.frontend.admission.queue import Line, QueuedRequest
from controller.router.load.work import FirstTokens

WINDOW_S = 10.0  # time constant: the weight of served work falls by a factor of e in this time
PRIOR_S = 1.0  # the initial estimate has the weight of a measurement of this length
FADES_S = 30.0  # time constant of the decay towards the initial estimate while no request waits
LEAST, MOST = 0.02, 8.0  # bounds of the efficiency: values outside do not describe the workers
MARGIN, MARGIN_MIN, MARGIN_MAX = 0.8, 0.2, 1.0  # parts of the deadline
LATE_TIMES = 0.9  # factor on the margin after a request that timed out
SERVED_MORE = 0.001  # added to the margin after a request that did not
ALONE_TIMES = 2.0  # times the time that an idle worker needs to read the prompt
SHARE = 0.2  # of retries of refused requests, relative to the others
REPEATS_LEAST = 3.0  # repeats always allowed per window
IDS_MAX = 8192
IDS_S = 120.0


class DrainRate:
    """The rate at which one line is served."""

    def __init__(self, now: float, efficiency: float = 1.0) -> None:
        """Start with this efficiency as the initial estimate."""
        self._at = now
        self._guess = efficiency
        self._served_work = efficiency * PRIOR_S
        self._possible_work = PRIOR_S
        self.efficiency = efficiency

    def pass_time(self, now: float, capacity: float, *, waited: bool) -> None:
        """Account for the time since the last call. `waited`: requests waited during all of it."""
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
        """Count served work."""
        self._served_work += work

    def rate(self, capacity: float) -> float:
        """Return the work served per second while requests wait."""
        return capacity * self.efficiency


class Inflow:
    """The work that arrives per second, as an exponentially weighted mean."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._at = 0.0

    def add(self, work: float, now: float) -> None:
        """Count arrived work."""
        self._sum = self._faded(now) + work
        self._at = max(now, self._at)

    def rate(self, now: float) -> float:
        """Return the work that arrives per second."""
        return self._faded(now) / WINDOW_S

    def _faded(self, now: float) -> float:
        return self._sum * exp(-max(0.0, now - self._at) / WINDOW_S)


@dataclass(frozen=True, slots=True)
class AdmissionVerdict:
    """The decision whether a request may wait, with the predicted times."""

    reason: str  # why it is refused at once; empty: it may wait
    wait_s: float  # predicted wait in line
    first_s: float  # predicted time from arrival to first token
    deadline_s: float  # the deadline that applies to the request
    latest_s: float  # latest time to send the request, from its arrival, so that its first token is in time
    in_time_with_room: bool = True  # the first token would be in time if a worker accepted the request now


class WorkerPool:
    """The measured service rate of one pool's line. The line itself is modified only by the `Queue`."""

    def __init__(self, line: Line, first: FirstTokens, now: float, efficiency: float = 1.0) -> None:
        self.line = line
        self.first = first
        self.capacity = 0.0  # the weights of its workers in service
        self.capacity_until = 0.0  # the capacity is outdated from then on
        self._drain = DrainRate(now, efficiency)
        self._inflow: dict[int, Inflow] = {}
        self._margins: dict[int, float] = {}  # by tier

    def pass_time(self, now: float) -> None:
        """Account for the time since the last call. Call it before the line changes, and before any query."""
        self._drain.pass_time(now, self.capacity, waited=len(self.line) > 0)

    def wait_s(self, request: QueuedRequest, now: float, capacity: float) -> float:
        """Return the seconds that a request would wait behind the requests already in line."""
        better = sum(flow.rate(now) for tier, flow in self._inflow.items() if tier < request.tier)
        rate = self._drain.rate(capacity)
        left = rate - min(better, 0.95 * rate)
        before = self.line.before(request.tier, request.client) + request.work / 2
        return before / left if left > 0 else inf

    def judge(
        self, request: QueuedRequest, now: float, capacity: float, step_s: float, *, room: bool
    ) -> AdmissionVerdict:
        """Return the decision on a request. `room`: a worker would accept it at once, and no request waits."""
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
        """Return the margin of a tier: the part of the deadline within which the predicted first token must be."""
        return self._margins.get(tier, MARGIN_MAX if tier == 0 else MARGIN)

    def arrived(self, request: QueuedRequest, now: float) -> None:
        """Count a request that is admitted or queued."""
        self._inflow.setdefault(request.tier, Inflow()).add(request.work, now)

    def served(self, request: QueuedRequest) -> None:
        """Count a request that leaves the line for a worker."""
        self._drain.take(request.work)
        self._margins[request.tier] = min(MARGIN_MAX, self.margin(request.tier) + SERVED_MORE)

    def timed_out(self, request: QueuedRequest) -> None:
        """Count a request that leaves the line because its deadline can no longer be met."""
        self._margins[request.tier] = max(MARGIN_MIN, self.margin(request.tier) * LATE_TIMES)


class RetryBudget:
    """Limits retries of one model's refused requests.

    In an overload, each retry of a refused request adds load: two retries turn an overload of factor 2 into one of factor 6.

        repeat      marked by the client (`X-Stainless-Retry-Count` of OpenAI's client), or a request with its id was refused
                    lately
        too many    repeats > 20 % of the other requests, over the last 10 s (after Envoy's retry budget)
    """

    def __init__(self, share: float = SHARE) -> None:
        self._share = share
        self._fresh, self._again = Inflow(), Inflow()

    def used_up(self, now: float) -> bool:
        """Return whether one more repeat would exceed the budget."""
        fresh, again = self._fresh.rate(now) * WINDOW_S, self._again.rate(now) * WINDOW_S
        return again + 1.0 > max(REPEATS_LEAST, self._share * fresh)

    def note(self, now: float, *, repeat: bool) -> None:
        """Count a request that the budget has not refused. `repeat`: it is a retry of a refused request."""
        (self._again if repeat else self._fresh).add(1.0, now)


class RefusedIds:
    """The ids of recently refused requests, for clients that send ids. Bounded."""

    def __init__(self) -> None:
        self._at: OrderedDict[str, float] = OrderedDict()

    def add(self, id: str, now: float) -> None:
        """Record the id of a refused request."""
        if id:
            self._at.pop(id, None)
            self._at[id] = now
            if len(self._at) > IDS_MAX:
                self._at.popitem(last=False)

    def knows(self, id: str, now: float) -> bool:
        """Return whether a request with this id was refused recently."""
        at = self._at.get(id)
        return at is not None and now - at <= IDS_S
