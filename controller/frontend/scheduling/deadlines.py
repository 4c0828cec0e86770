"""Who is let in by the time to his first token, who waits, and who is refused at once?

    look      before its texts are read: those in line already take longer than it has ──▶ refused, at the cost of a look
    enter     a worker has room ──▶ in
              a running answer of the last tier may be put off for it (`park`) ──▶ in
              it would be served in time ──▶ in line: its tier's, fairly between clients (`line`) ── in time ──▶ in
              │                                                                    └── its time is over ──▶ refused
              └── else ──▶ refused at once, with the wait that it would have had

What is ahead is counted as work: prompt tokens that are cached nowhere, and places in batches for as long as answers take. How
fast it is taken is what was measured while somebody waited (`pools`). A repeat of what was refused is refused first, where there
are too many of them.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf, isfinite
from operator import itemgetter
from typing import Generic, Protocol, TypeVar

from controller.frontend.openai.request_head import AdmissionHeaders
from controller.frontend.scheduling.deadline_line import CLOCK_S, DeadlineLine
from controller.frontend.scheduling.pools import Pools, step_s
from controller.frontend.scheduling.queue import Queue, Room, WaitedTooLong
from controller.frontend.scheduling.scheduler import Scheduler
from controller.frontend.settings import FrontendSettings
from controller.router.admission.line import PlaceInLine
from controller.router.admission.pool import AdmissionVerdict, Asked, WorkerPool
from controller.router.admission.retries import RefusedIds, RetryBudget
from controller.router.admission.work import Demand, reading_s, work_s
from controller.router.endpoints import Endpoint, EndpointTable, Lineage
from controller.router.load.monitor import NOTHING, WantedRoom
from controller.router.selection.filter import AllBusy, NotServed, NoWorker
from events.blocks import BlockNames
from events.errors import HoldfastError

BEYOND = 0.125  # of a batch
PREEMPTS = 0.5  # of the time that a request of the best tier may wait, after which running answers are put off for it
SPILLS = 0.7  # of the time that a request may wait, after which it may do so at a worker
CAPACITY_S = 0.05  # what a pool's workers weigh is as good as new for so long
ONE_WORKER = 1.0  # the weight of one that serves fully
LATEST_S = 86_400.0  # no timer is set for later


class TooLate(HoldfastError):
    """A request is refused because of its deadline, or as a repeat. `reason` is the code of its answer."""

    def __init__(self, reason: str, message: str, wait_s: float, *, should_retry: bool = True) -> None:
        """`wait_s`: in so long it would be let in, if nobody else came; inf: nobody knows."""
        super().__init__(message)
        self.reason = reason
        self.wait_s = wait_s
        self.should_retry = should_retry


@dataclass(frozen=True, slots=True)
class WantedRequest:
    """One request, as it comes."""

    model: str
    tier: str
    asked: AdmissionHeaders
    client: str
    arrived: float  # by the frontend's monotonic clock
    id: str = ""  # that its client has given it


@dataclass(frozen=True, slots=True)
class WantedTokens:
    """What it asks for, once its texts are read."""

    prompts: Sequence[tuple[int, BlockNames]]  # tokens, and what their blocks are called
    answers: int  # to each
    answer_tokens: int  # of each, at most


R = TypeVar("R", bound=Room)


class RoomMaker(Protocol):
    """Puts running answers off for more urgent requests: see `Preemption`."""

    def may(self, model: str, lineage: Lineage, tier: int) -> bool:
        """Say whether room can be made for a request of this tier."""
        ...

    def make_room(self, model: str, lineage: Lineage) -> bool:
        """Put one answer off. False: there is none that may be."""
        ...

    def in_vain(self, model: str, lineage: Lineage) -> None:
        """What was tried has brought no room."""
        ...

    def waits(self, model: str, lineage: Lineage, tier: int) -> bool:
        """Say whether an answer is put off that comes before requests of this tier."""
        ...


class Deadlines(Generic[R]):
    """One frontend's lines by deadlines."""

    def __init__(
        self,
        settings: FrontendSettings,
        table: EndpointTable,
        routing: Scheduler,
        pools: Pools,
        preemption: RoomMaker,
        queue: Queue[R],
        find: Callable[[str, Lineage, WantedRoom, float], R],
    ) -> None:
        """Begin with nobody. `find` finds room at a worker of a pool for a request that takes so much, and that may wait at the
        worker, beyond a full batch by such a part of one; or raises NoWorker."""
        self._settings = settings
        self._table = table
        self._routing = routing
        self._monitor = routing.monitor
        self._lengths = routing.monitor.lengths
        self.pools = pools
        self._preemption = preemption
        self._queue = queue
        self._find = find
        self._now = pools.now
        self._budgets: dict[str, RetryBudget] = {}
        self._refused = RefusedIds()
        self._lineages: dict[str, tuple[Lineage, ...]] = {}
        self._of: object = None  # the table's endpoints by model, of which these are the lineages
        self._capacities: dict[tuple[str, Lineage], tuple[float, float]] = {}  # until when, how much

    # --- what is known

    def ended(self, model: str, tokens: int) -> None:
        """An answer is over: the next ones are expected to be as long."""
        self._lengths.ended(model, tokens)

    def keep(self) -> None:
        """Forget what endpoints are gone were known by."""
        endpoints = self._table.endpoints.values()
        self.pools.keep({(e.model, e.lineage) for e in endpoints}, {e.worker for e in endpoints})
        self._capacities.clear()

    def _lineage(self, model: str) -> Lineage:
        """Return the lineage that a new request is bound to. Raise NoWorker."""
        if self._of is not self._table.models:
            self._of = self._table.models
            self._lineages = {
                name: tuple(dict.fromkeys(e.lineage for e in endpoints))
                for name, endpoints in self._table.models.items()
            }
        lineages = self._lineages.get(model, ())
        if not lineages:
            raise NotServed
        if len(lineages) == 1:
            return lineages[0]
        try:
            return self._routing.lineage(model)
        except NoWorker:
            for lineage in lineages:
                with suppress(NoWorker):
                    self._soon(model, lineage)
                    return lineage
            raise

    def _capacity(self, model: str, lineage: Lineage) -> float:
        """Return what a pool's workers weigh together."""
        now = self._now()
        until, capacity = self._capacities.get((model, lineage), (0.0, 0.0))
        if now >= until:
            capacity = self._monitor.weight(model, lineage)
            self._capacities[model, lineage] = now + CAPACITY_S, capacity
        return capacity

    def _soon(self, model: str, lineage: Lineage) -> float:
        """Return what a pool without a serving worker will weigh soon: one worker, be it a suspect that is to serve as the last
        one, or one whose server has closed for a moment. Raise NoWorker where none will serve."""
        with suppress(AllBusy):
            self._find(model, lineage, NOTHING, 0.0).free()
        return ONE_WORKER

    def _deadline(self, wanted: WantedRequest) -> tuple[float, bool]:
        """Return until when the first token is wanted, from the arrival, and whether the client has said so himself."""
        if wanted.asked.deadline_s is not None:
            return wanted.asked.deadline_s, True
        usual_ms = self._settings.ttft_deadlines.get(wanted.tier)
        if usual_ms is None:
            usual_ms = self._table.slo(wanted.model).slo_ttft_ms
        if usual_ms is None:
            return inf, False
        return usual_ms / 1000 * self._table.knobs(wanted.model).latency, False

    def _stands_s(self, wanted: WantedRequest) -> float:
        """Return the longest that a request stands in line, whatever its deadline."""
        if wanted.asked.line_s is not None:
            return wanted.asked.line_s
        return inf if isfinite(self._deadline(wanted)[0]) else self._settings.admission.queue_s

    # --- the way in

    def look(self, wanted: WantedRequest) -> Lineage:
        """Return the lineage that a request is bound to from now on, if it may still be let in. Raise TooLate, or NoWorker."""
        model, now = wanted.model, self._now()
        lineage = self._lineage(model)
        pool = self.pools.of(model, lineage)
        contended = len(pool.line) > 0
        budget = self._budgets.setdefault(model, RetryBudget(self._settings.admission.retry_budget))
        repeat = wanted.asked.retries > 0 or (wanted.id, now) in self._refused
        if repeat and contended and budget.used_up(now):
            self._refused.add(wanted.id, now)
            why = "too many requests are repeats of refused ones: please retry later"
            raise TooLate("retry_budget", why, inf, should_retry=False)
        budget.note(now, repeat=repeat)
        if contended:
            self._judge(pool, wanted, lineage, Asked(self._table.urgency(wanted.tier), wanted.client, inf))
        return lineage

    async def enter(self, wanted: WantedRequest, lineage: Lineage, tokens: WantedTokens) -> tuple[R, float]:
        """Return room for a request, at once or when its turn has come, and until when its first token is wanted. Raise TooLate,
        QueueFull, or NoWorker for another reason than that all are busy."""
        model = wanted.model
        pool, turns = self.pools.of(model, lineage), self._turns(model, lineage)
        takes = self._takes(wanted, lineage, tokens)
        asked = self._asked(wanted, lineage, tokens, takes.unread)
        room: R | None = None
        if len(pool.line) == 0 and not self._queue.sent_back(model):
            with suppress(AllBusy):
                room = self._room(model, lineage, asked.tier, takes, 0.0)
        try:
            verdict = self._judge(pool, wanted, lineage, asked, room=room is not None)
        except BaseException:
            if room is not None:
                room.free()
            raise
        until = wanted.arrived + verdict.deadline_s
        if verdict.reason:  # nobody has room in time, but it can be made
            room = self._made_room(pool, model, lineage, takes)
        if room is not None:
            pool.came(asked.tier, asked.work, self._now())
            return room, until
        latest = wanted.arrived + verdict.latest_s
        leaves = min(latest, self._now() + self._stands_s(wanted))

        def push(turn: "asyncio.Future[R]") -> None:
            place = PlaceInLine(turn, asked.tier, asked.client, asked.work, wanted.arrived, latest)
            turns.push(place, takes)

        try:
            return await self._queue.stand(model, turns, push, min(LATEST_S, leaves - self._now())), until
        except WaitedTooLong:
            if self._now() < leaves - CLOCK_S:
                raise  # all are sent away
            raise self._late(pool, wanted, lineage, asked, verdict) from None

    def _turns(self, model: str, lineage: Lineage) -> "DeadlineLine[R]":
        turns = self._queue.line(
            model,
            lineage,
            lambda: DeadlineLine(
                lambda: self.pools.of(model, lineage),
                self._now,
                lambda: self._capacity(model, lineage),
                lambda place, takes: self._take(model, lineage, place, takes),
            ),
        )
        assert isinstance(turns, DeadlineLine)
        return turns

    def _room(self, model: str, lineage: Lineage, tier: int, takes: WantedRoom, beyond: float) -> R:
        """Return room for a request, unless it is wanted for an answer that was put off. Raise NoWorker."""
        if self._preemption.waits(model, lineage, tier):
            raise AllBusy
        return self._find(model, lineage, takes, beyond)

    def _made_room(
        self, pool: "WorkerPool[asyncio.Future[R]]", model: str, lineage: Lineage, takes: WantedRoom
    ) -> R | None:
        """Put an answer off. Return the room that this has made; None: those in line get it, or it is to be seen yet."""
        if not self._make_room(model, lineage, takes) or len(pool.line) > 0:
            return None
        return self._find_made(model, lineage, takes)

    def _make_room(self, model: str, lineage: Lineage, takes: WantedRoom) -> bool:
        with self._monitor.asking(takes):
            return self._preemption.make_room(model, lineage)

    def _find_made(self, model: str, lineage: Lineage, takes: WantedRoom) -> R | None:
        try:
            return self._find(model, lineage, takes, 0.0)
        except AllBusy:
            self._preemption.in_vain(model, lineage)
            return None

    def _take(
        self, model: str, lineage: Lineage, place: "PlaceInLine[asyncio.Future[R]]", takes: WantedRoom
    ) -> R:
        """Return room for the head of the line. Raise NoWorker."""
        try:
            return self._room(model, lineage, place.tier, takes, self._beyond(place))
        except AllBusy:
            late = self._used_up(place) >= PREEMPTS and self._preemption.may(model, lineage, place.tier)
            if not late or not self._make_room(model, lineage, takes):
                raise
            room = self._find_made(model, lineage, takes)
            if room is None:
                raise
            return room

    def best_waiting(self, model: str, lineage: Lineage) -> int | None:
        """Return the best tier of which anybody waits; None: nobody does."""
        head = self.pools.of(model, lineage).line.head(self._now())
        return head.tier if head is not None else None

    def _used_up(self, place: "PlaceInLine[asyncio.Future[R]]") -> float:
        """Return which part of the time that it may wait a request has waited."""
        return (self._now() - place.since) / max(place.latest - place.since, 1e-9)

    def _beyond(self, place: "PlaceInLine[asyncio.Future[R]]") -> float:
        """Return how much more than a worker's batch there may be for a request, as a part of it. Where several frontends share
        the workers, one of the best tier that has waited for a while goes into a worker's own line, which is by tier: there it
        gets the next place, whichever frontend's request leaves it."""
        if place.tier > 0 or self._routing.frontends() == 1:
            return 0.0
        return BEYOND if self._used_up(place) >= SPILLS else 0.0

    def _takes(self, wanted: WantedRequest, lineage: Lineage, tokens: WantedTokens) -> WantedRoom:
        """Return what a request takes of a worker. Raise NoWorker."""
        group, scheduler = self._routing.group(wanted.model, lineage), self._routing
        unread = sum(scheduler.uncached(group, names, count) for count, names in tokens.prompts)
        longest, names = max(tokens.prompts, key=itemgetter(0))
        return self._monitor.wanted(wanted.model, longest, tokens.answer_tokens, names, unread)

    def _asked(self, wanted: WantedRequest, lineage: Lineage, tokens: WantedTokens, unread: int) -> Asked:
        """Return what a request asks of its pool, in seconds of its workers. Raise NoWorker."""
        example = self._routing.group(wanted.model, lineage).endpoints[0]
        expected = self._lengths.expected(wanted.model, tokens.answer_tokens)
        prompt = sum(count for count, _ in tokens.prompts)
        demand = Demand(unread, prompt, tokens.answers * len(tokens.prompts), expected)
        profile = example.joined.profile
        work = work_s(demand, profile, self._batch(example))
        return Asked(
            self._table.urgency(wanted.tier), wanted.client, inf, work=work, own_s=reading_s(unread, profile)
        )

    def _batch(self, endpoint: Endpoint) -> int:
        return max(1, int(endpoint.max_batch * self._table.knobs(endpoint.model).batch_size))

    def _judge(
        self,
        pool: "WorkerPool[asyncio.Future[R]]",
        wanted: WantedRequest,
        lineage: Lineage,
        asked: Asked,
        *,
        room: bool = False,
    ) -> AdmissionVerdict:
        """Return the verdict on a request that may be let in, with a reason against it where room has to be made. Raise TooLate
        if it may not, or NoWorker where no worker serves or will soon."""
        capacity = now_there = self._capacity(wanted.model, lineage)
        if capacity <= 0:
            capacity = self._soon(wanted.model, lineage)
        now = self._now()
        deadline_s, own = self._deadline(wanted)
        line_s = self._stands_s(wanted)
        asked = Asked(
            asked.tier, asked.client, deadline_s, own, asked.work, asked.own_s, now - wanted.arrived, line_s
        )
        example = self._routing.group(wanted.model, lineage).endpoints[0]
        pool.pass_time(now, now_there)
        verdict = pool.judge(asked, now, capacity, step_s(example), room=room)
        makes_room = not room and verdict.in_time_with_room and bool(verdict.reason)
        if verdict.reason and not (makes_room and self._preemption.may(wanted.model, lineage, asked.tier)):
            raise self._refusal(wanted, verdict, pool.margin(asked.tier))
        return verdict

    # --- refusals

    def _refusal(self, wanted: WantedRequest, verdict: AdmissionVerdict, margin: float) -> TooLate:
        now, deadline_s = self._now(), verdict.deadline_s
        self._refused.add(wanted.id, now)
        if verdict.reason == "deadline_unattainable":
            why = f"the first token cannot come within the deadline of {deadline_s:g} s: reading this prompt takes longer"
            return TooLate(verdict.reason, why, inf, should_retry=False)
        shown = f"{verdict.first_s:.3g} s" if isfinite(verdict.first_s) else "too long"
        why = f"the first token would take {shown}, with a deadline of {deadline_s:g} s: please retry later"
        again = not self._budgets[wanted.model].used_up(now)
        return TooLate(verdict.reason, why, verdict.first_s - margin * deadline_s, should_retry=again)

    def _late(
        self,
        pool: "WorkerPool[asyncio.Future[R]]",
        wanted: WantedRequest,
        lineage: Lineage,
        asked: Asked,
        verdict: AdmissionVerdict,
    ) -> TooLate:
        """Return why one is refused who has waited in vain, or is sent away."""
        now = self._now()
        self._refused.add(wanted.id, now)
        wait_s = pool.wait_s(asked, now, self._capacity(wanted.model, lineage))
        why = (
            f"no worker became free in time for the deadline of {verdict.deadline_s:g} s: please retry later"
        )
        again = not self._budgets[wanted.model].used_up(now)
        return TooLate("deadline", why, wait_s, should_retry=again)
