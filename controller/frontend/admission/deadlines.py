"""Admission by deadlines: decides whether a request is admitted, may wait, or is refused at once.

    look     before tokenization: the requests in line already take longer than the deadline ──▶ refused
    judge    a worker has room ──▶ admitted
             the request would be served in time ──▶ it may wait
             a running answer of the last tier may be preempted for it ──▶ the answer is preempted
             otherwise ──▶ refused at once, with the predicted wait

`look` and `judge` are methods of `Deadlines`; their outcomes are tried from top to bottom.

The work ahead of a request consists of uncached prompt tokens to prefill, and of the seconds for which each
answer occupies a batch slot. `WorkerPool` measures the rate at which workers process this work while requests
wait. If too many requests are retries of refused requests, the retries are refused first.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf, isfinite
from operator import itemgetter

from controller.frontend.admission.pool import RefusedIds, RetryBudget, WorkerPool
from controller.frontend.admission.queue import Queue, QueuedRequest
from controller.frontend.admission.refusals import TooLate
from controller.frontend.openai.request_head import AdmissionHeaders
from controller.frontend.scheduling.scheduler import Pools, Scheduler, step_s
from controller.frontend.settings import FrontendSettings
from controller.router.endpoints import Endpoint, EndpointTable, Key, Lineage
from controller.router.load.monitor import NOTHING, RequiredRoom
from controller.router.load.work import Demand, reading_s, work_s
from controller.router.selection.filter import (
    AllBusy,
    AllClosed,
    NoneReachable,
    NoneRoutable,
    NotServed,
    NoWorker,
)
from events.blocks import BlockNames

BEYOND = 0.125  # share of its batch size by which a full worker may be exceeded
PREEMPTS = 0.5  # share of the permitted waiting time after which a best-tier request may preempt an answer
# share of the permitted waiting time after which a best-tier request may wait in a worker's own queue
SPILLS = 0.7


class Preemptor:
    """Preempts running answers for more urgent requests. This base class never preempts; `Preemption` does."""

    def may(self, model: str, lineage: Lineage, tier: int) -> bool:
        """Return whether a running answer can be preempted for a request of this tier."""
        return False

    def make_room(self, model: str, lineage: Lineage) -> bool:
        """Preempt one answer so that its worker has room. Return False if no answer may be preempted."""
        return False

    def in_vain(self, model: str, lineage: Lineage) -> None:
        """Record that the last preemption left the worker without room, so that preemption pauses."""

    def waits(self, model: str, lineage: Lineage, tier: int) -> bool:
        """Return whether a preempted answer must resume before requests of this tier are admitted."""
        return False


@dataclass(eq=False, repr=False)
class RoomFinder:
    """Finds a worker with room for a request that is about to be sent, and preempts an answer for an urgent request.

    a worker has room ──▶ its endpoint is returned
    all workers are busy, or one of them can serve soon ──▶ AllBusy: the request may wait
    a request of the best tier would miss its deadline ──▶ a running answer of the last tier is preempted ──▶ its endpoint
    no worker can serve soon ──▶ another NoWorker
    """

    queue_s: float  # a server that is closed (sent Retry-After) for longer than this is not waited for
    table: EndpointTable
    routing: Scheduler
    preemptor: Preemptor

    def find(
        self,
        model: str,
        lineage: Lineage | None = None,
        wanted: RequiredRoom = NOTHING,
        beyond: float = 0.0,
        without: Collection[Key] = (),
    ) -> Endpoint:
        """Return an endpoint of the model with room for the request, of this lineage, or of any lineage if `lineage` is
        None.

        `wanted` is the room that the request needs. Endpoints in `without` are excluded. `beyond` is the share of its
        batch size by which a full endpoint may be exceeded. Raise NoWorker if no endpoint has room.
        """
        try:
            monitor = self.routing.monitor
            if wanted is monitor.asked and not beyond:  # the common case
                return self.routing.room(model, lineage, without)
            with monitor.asking(wanted, beyond):
                return self.routing.room(model, lineage, without)
        except AllClosed as error:
            if error.wait_s > self.queue_s:
                raise
            raise AllBusy from error  # worth waiting for
        except (NoneRoutable, NoneReachable, NotServed) as error:
            if not self.table.stands_in(model, lineage, without):
                raise
            raise AllBusy from error  # worth waiting for: a suspect is about to serve as the last worker

    def for_queued(self, request: QueuedRequest, wanted: RequiredRoom, beyond: float = 0.0) -> Endpoint:
        """Return an endpoint with room for a queued request. Raise NoWorker if there is none.

        Raise AllBusy if a preempted answer of the same or a better tier must resume first.
        """
        model, lineage = request.model, request.lineage
        if lineage is not None and self.preemptor.waits(model, lineage, request.tier):
            raise AllBusy
        return self.find(model, lineage, wanted, beyond)

    def for_head(self, request: QueuedRequest, wanted: RequiredRoom, now: float) -> Endpoint:
        """Return an endpoint with room for the first request of a line. Raise NoWorker if there is none.

        A best-tier request that has waited for long may exceed a worker's batch size, or may preempt a running
        answer.
        """
        used_up = request.used_up(now)
        # If several frontends share the workers, a best-tier request that has waited for a while is sent into a worker's own
        # queue, which is ordered by tier. There it gets the next free slot, even if another frontend's request frees that slot.
        spills = request.tier == 0 and used_up >= SPILLS and self.routing.frontends() != 1
        try:
            return self.for_queued(request, wanted, BEYOND if spills else 0.0)
        except AllBusy:
            if used_up < PREEMPTS or not self.may_preempt(request):
                raise
            if (made := self.preempt(request, wanted)) is None:
                raise
            return made

    def may_preempt(self, request: QueuedRequest) -> bool:
        """Return whether a running answer may be preempted for this request."""
        model, lineage = request.model, request.lineage
        return lineage is not None and self.preemptor.may(model, lineage, request.tier)

    def preempt(self, request: QueuedRequest, wanted: RequiredRoom, *, first: bool = True) -> Endpoint | None:
        """Preempt a running answer and return the endpoint at which the request now has room.

        Return None if no room is free yet, or if the request is not the `first` in line, because earlier requests get
        the room. Raise NoWorker if no worker can serve the request.
        """
        model, lineage = request.model, request.lineage
        assert lineage is not None
        monitor = self.routing.monitor
        with monitor.asking(wanted):
            made = self.preemptor.make_room(model, lineage)
        try:
            return self.find(model, lineage, wanted) if made and first else None
        except AllBusy:
            self.preemptor.in_vain(model, lineage)
            return None


CAPACITY_S = 0.05  # seconds for which a pool's computed capacity is reused
ONE_WORKER = 1.0  # the weight of one worker in full service


@dataclass(frozen=True, slots=True)
class WantedRequest:
    """What is known of a request before its texts are tokenized: model, tier, admission headers, client and arrival."""

    model: str
    tier: str
    asked: AdmissionHeaders
    client: str
    arrived: float  # by the frontend's monotonic clock
    id: str = ""  # request id, if the client has set one


@dataclass(frozen=True, slots=True)
class WantedTokens:
    """The number and length of a request's prompts and answers, known after its texts are tokenized."""

    prompts: Sequence[tuple[int, BlockNames]]  # number of tokens, and the names of their blocks
    answers: int  # number of answers to each prompt
    answer_tokens: int  # maximum tokens of each answer


@dataclass(eq=False, repr=False)
class Deadlines:
    """Decides for one frontend whether a request can meet its deadline, from the measured service rate of each worker
    pool.
    """

    settings: FrontendSettings
    table: EndpointTable
    routing: Scheduler
    queue: Queue
    rooms: RoomFinder
    first_tokens: Pools
    _pools: dict[tuple[str, Lineage], WorkerPool] = field(default_factory=dict)
    _budgets: dict[str, RetryBudget] = field(default_factory=dict)
    _refused: RefusedIds = field(default_factory=RefusedIds)
    # the table's models when `_lineages` was computed
    _models: Mapping[str, Sequence[Endpoint]] = field(default_factory=dict)
    _lineages: dict[str, list[Lineage]] = field(default_factory=dict)

    # --- pools

    def pool(self, model: str, lineage: Lineage) -> WorkerPool:
        """Return the pool of the model's workers of this lineage, with its measurements updated to the current time."""
        pool, now = self._pools.get((model, lineage)), self.first_tokens.now()
        if pool is None:
            # Until a frontend has measured its actual share of the workers, it assumes an equal share.
            first, share = self.first_tokens.of(model, lineage), 1.0 / max(1, self.routing.frontends())
            pool = WorkerPool(self.queue.line(model, lineage), first, now, share)
            self._pools[model, lineage] = pool
        if now >= pool.capacity_until:
            monitor, pool.capacity_until = self.routing.monitor, now + CAPACITY_S
            pool.capacity = monitor.weight(model, lineage)
        pool.pass_time(now)
        return pool

    def keep(self) -> None:
        """Remove the pools that have no workers and no waiting requests, and the measurements of workers that have left."""
        endpoints = self.table.endpoints.values()
        names = {(e.model, e.lineage) for e in endpoints}
        names |= {name for name, pool in self._pools.items() if len(pool.line) > 0}
        self._pools = {name: pool for name, pool in self._pools.items() if name in names}
        self.first_tokens.keep(names, {e.worker for e in endpoints})
        for pool in self._pools.values():
            pool.capacity_until = 0.0

    # --- the requirements of a request

    def look(self, wanted: WantedRequest) -> Lineage:
        """Return the lineage that a new request is bound to, and count the request in the retry budget.

        Raise TooLate if its deadline cannot be met, or if it exceeds the retry budget. Raise NoWorker if no worker
        can serve the model.
        """
        model, now = wanted.model, self.first_tokens.now()
        lineage = self._lineage(model)
        contended = len(self.queue.line(model, lineage)) > 0
        budget = self._budgets.setdefault(model, RetryBudget(self.settings.admission.retry_budget))
        repeat = wanted.asked.retries > 0 or self._refused.knows(wanted.id, now)
        if repeat and contended and budget.used_up(now):
            self._refused.add(wanted.id, now)
            why = "too many requests are retries of refused ones: please retry later"
            raise TooLate("retry_budget", why, inf, should_retry=False)
        budget.note(now, repeat=repeat)
        if contended:
            self.judge(self._request(wanted, lineage, 0.0, 0.0))
        return lineage

    def _lineage(self, model: str) -> Lineage:
        """Return the lineage that a new request is bound to. Raise NoWorker if no worker serves the model now or soon."""
        if self._models is not self.table.models:
            self._models = models = self.table.models
            self._lineages = {name: [*dict.fromkeys(e.lineage for e in models[name])] for name in models}
        lineages = self._lineages.get(model, [])
        if not lineages:
            raise NotServed
        if len(lineages) == 1:
            return lineages[0]
        try:
            return self.routing.lineage(model)
        except NoWorker:
            for lineage in lineages:
                with suppress(NoWorker):
                    self._capacity_soon(model, lineage)
                    return lineage
            raise

    def _capacity_soon(self, model: str, lineage: Lineage) -> float:
        """Return ONE_WORKER: the capacity that a pool without a serving worker will have soon.

        That worker is a suspect that is about to serve as the model's last worker, or its server is closed for a
        short time. Raise NoWorker if no worker will serve soon.
        """
        with suppress(AllBusy):
            self.rooms.find(model, lineage)
        return ONE_WORKER

    def _request(
        self, wanted: WantedRequest, lineage: Lineage, work: float, reading_s: float
    ) -> QueuedRequest:
        """Create the queue entry of a request, with its deadline in seconds from arrival.

        The deadline is set by the client, or else by the request's tier, or else by the model's objective.
        """
        model, tier, asked = wanted.model, self.table.urgency(wanted.tier), wanted.asked
        deadline_s, own = asked.deadline_s, asked.deadline_s is not None
        if deadline_s is None:
            usual_ms = self.settings.ttft_deadlines.get(wanted.tier, self.table.slo(model).slo_ttft_ms)
            deadline_s = inf if usual_ms is None else usual_ms / 1000 * self.table.knobs(model).latency
        line_s = asked.line_s
        if line_s is None:
            line_s = inf if isfinite(deadline_s) else self.settings.admission.queue_s
        return QueuedRequest(
            model, lineage, tier, wanted.client, work, wanted.arrived,
            deadline_s=deadline_s, own_deadline=own, reading_s=reading_s, line_s=line_s, id=wanted.id,
        )  # fmt: skip

    def needs(
        self, wanted: WantedRequest, lineage: Lineage, tokens: WantedTokens
    ) -> tuple[QueuedRequest, RequiredRoom]:
        """Return the queue entry of a tokenized request, with its estimated work, and the room that it needs at a worker.

        Raise NoWorker if the model has no workers of this lineage.
        """
        model, answer_max = wanted.model, tokens.answer_tokens
        group = self.routing.group(model, lineage)
        monitor, state, example = self.routing.monitor, self.routing.state, group.endpoints[0]
        unread = sum(state.uncached(group, names, count) for count, names in tokens.prompts)
        longest, names = max(tokens.prompts, key=itemgetter(0))
        prompt = sum(count for count, _ in tokens.prompts)
        expected = monitor.lengths.expected(model, answer_max)
        demand = Demand(unread, prompt, tokens.answers * len(tokens.prompts), expected)
        batch = max(1, int(example.max_batch * self.table.knobs(model).batch_size))
        profile = example.joined.profile
        work, read_s = work_s(demand, profile, batch), reading_s(unread, profile)
        room = monitor.wanted(model, longest, answer_max, names, unread)
        return self._request(wanted, lineage, work, read_s), room

    # --- the decision

    def judge(self, request: QueuedRequest, *, room: bool = False) -> bool:
        """Set the deadline of a request and the time until which it may wait. Return whether a preemption is needed to
        meet the deadline.

        `room` states that a worker has room for the request. Raise TooLate if the request is refused. Raise NoWorker
        if no worker serves the model now or soon.
        """
        model, lineage = request.model, request.lineage
        assert lineage is not None
        pool = self.pool(model, lineage)
        capacity = pool.capacity if pool.capacity > 0 else self._capacity_soon(model, lineage)
        step = step_s(self.routing.group(model, lineage).endpoints[0])
        verdict = pool.judge(request, self.first_tokens.now(), capacity, step, room=room)
        deadline_s, first_s = verdict.deadline_s, verdict.first_s
        request.deadline_s, request.latest = deadline_s, request.since + verdict.latest_s
        if not verdict.reason:
            return False
        if not room and verdict.in_time_with_room and self.rooms.may_preempt(request):
            return True
        if verdict.reason == "deadline_unattainable":
            self._refused.add(request.id, self.first_tokens.now())
            why = f"the first token cannot arrive within the deadline of {deadline_s:g} s: prefilling this prompt takes longer"
            raise TooLate(verdict.reason, why, inf, should_retry=False)
        shown = f"{first_s:.3g} s" if isfinite(first_s) else "too long"
        why = f"the first token would take {shown}, with a deadline of {deadline_s:g} s"
        raise self._too_late(request, why, first_s - pool.margin(request.tier) * deadline_s)

    def timed_out(self, request: QueuedRequest) -> TooLate:
        """Record the id of a request that waited in line for too long, and return the error for its client."""
        assert request.lineage is not None
        pool = self.pool(request.model, request.lineage)
        why = f"no worker became free in time for the deadline of {request.deadline_s:g} s"
        return self._too_late(request, why, pool.wait_s(request, self.first_tokens.now(), pool.capacity))

    def _too_late(self, request: QueuedRequest, why: str, wait_s: float) -> TooLate:
        now = self.first_tokens.now()
        self._refused.add(request.id, now)
        again = not self._budgets[request.model].used_up(now)
        return TooLate("deadline", f"{why}: please retry later", wait_s, should_retry=again)
