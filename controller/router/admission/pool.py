"""May this request wait before its pool of workers, and for how long would it? A pool are the workers of one model and lineage.

    wait     (work before it + half of its own) / (rate of the line - what comes for better tiers meanwhile)
    first token    wait + what a worker takes then (`FirstTokens`)
    admitted       where that is within a part of its deadline: what is predicted is not what comes

The part is 0.8 at first (all of it in the best tier, which nobody overtakes), less after each request that became late in line,
and grows with each that did not: so that about one of a hundred does, in each tier.

A deadline that nobody could keep, with nothing else to do, is refused where the client has set it himself. Where it is only his
tier's or the model's, a long prompt has twice as long as reading it takes.
"""

from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

from controller.router.admission.drain import DrainRate, Inflow
from controller.router.admission.line import Line, PlaceInLine
from controller.router.admission.ttft import FirstTokens

T = TypeVar("T")

MARGIN, MARGIN_MIN, MARGIN_MAX = 0.8, 0.2, 1.0  # parts of the deadline
LATE_TIMES = 0.9  # what the part becomes after one that was late
SERVED_MORE = 0.001  # that it grows by after one that was not
ALONE_TIMES = 2.0  # what reading a prompt takes a worker that has nothing else to do
WORK_LEAST = 1e-6


@dataclass(frozen=True, slots=True)
class Asked:
    """What one request asks of a pool. Seconds."""

    tier: int  # 0 is the best
    client: str
    deadline_s: float  # from its arrival to its first token
    own_deadline: bool = False  # its client has set it himself
    work: float = 0.0  # of a worker
    own_s: float = 0.0  # to read what of its prompt is cached nowhere, by the profile
    waited_s: float = 0.0  # since it arrived
    line_s: float = inf  # the most that it wants to stand in line


@dataclass(frozen=True, slots=True)
class AdmissionVerdict:
    """What becomes of it."""

    reason: str  # why it is refused at once; empty: it may wait
    wait_s: float  # that it has in line, as predicted
    first_s: float  # from its arrival to its first token
    deadline_s: float  # that holds for it
    latest_s: float  # from its arrival: sent later, its first token comes too late
    in_time_with_room: bool = True  # if a worker took it now, its first token would come in time


class WorkerPool(Generic[T]):
    """One pool's line, and what is known of how fast it is served."""

    def __init__(self, now: float, efficiency: float = 1.0) -> None:
        self.line: Line[T] = Line()
        self.drain = DrainRate(now, efficiency)
        self.first = FirstTokens()
        self._inflow: dict[int, Inflow] = {}
        self._margins: dict[int, float] = {}  # by tier

    def pass_time(self, now: float, capacity: float) -> None:
        """Take in that time has passed. To be called before anything is asked or changes."""
        self.drain.pass_time(now, capacity, waited=len(self.line) > 0)

    def wait_s(self, asked: Asked, now: float, capacity: float) -> float:
        """Return how long a request would stand in line, behind those who do already."""
        better = sum(flow.rate(now) for tier, flow in self._inflow.items() if tier < asked.tier)
        rate = self.drain.rate(capacity)
        left = rate - min(better, 0.95 * rate)
        before = self.line.before(asked.tier, asked.client) + asked.work / 2
        return before / left if left > 0 else inf

    def judge(
        self, asked: Asked, now: float, capacity: float, step_s: float, *, room: bool
    ) -> AdmissionVerdict:
        """Return what becomes of a request. `room`: some worker would take it at once, and nobody waits."""
        first = self.first
        alone_s = first.alone_s(asked.own_s, step_s)
        deadline_s = asked.deadline_s if asked.own_deadline else max(asked.deadline_s, ALONE_TIMES * alone_s)
        wait_s = 0.0 if room else self.wait_s(asked, now, capacity)
        usual_s = alone_s if room else first.usual_s(asked.own_s, step_s)
        first_s = asked.waited_s + wait_s + usual_s
        latest_s = deadline_s - usual_s
        in_time = asked.waited_s + alone_s <= deadline_s
        if not in_time:
            reason = "deadline_unattainable" if alone_s > asked.deadline_s else "deadline"
        elif not room and (first_s > self.margin(asked.tier) * deadline_s or wait_s > asked.line_s):
            reason = "deadline"
        else:
            reason = ""
        return AdmissionVerdict(reason, wait_s, first_s, deadline_s, latest_s, in_time)

    def margin(self, tier: int) -> float:
        """Return within what part of its deadline a first token must be predicted in this tier."""
        return self._margins.get(tier, MARGIN_MAX if tier == 0 else MARGIN)

    def push(self, place: PlaceInLine[T], now: float) -> None:
        """Let a request wait."""
        place.work = max(place.work, WORK_LEAST)
        self.line.push(place)
        self.came(place.tier, place.work, now)

    def came(self, tier: int, work: float, now: float) -> None:
        """Work of a tier was let in."""
        flow = self._inflow.get(tier)
        if flow is None:
            flow = self._inflow[tier] = Inflow()
        flow.add(work, now)

    def served(self, place: PlaceInLine[T]) -> None:
        """The head of the line goes to a worker."""
        self.line.served(place)
        self.drain.take(place.work)
        self._margins[place.tier] = min(MARGIN_MAX, self.margin(place.tier) + SERVED_MORE)

    def late(self, place: PlaceInLine[T]) -> None:
        """One has stood in line until it was too late: it leaves."""
        self.line.remove(place)
        self._margins[place.tier] = max(MARGIN_MIN, self.margin(place.tier) * LATE_TIMES)
