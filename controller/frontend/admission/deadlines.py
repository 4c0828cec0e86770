"""Admission by deadlines: decides whether a request is admitted, may wait, or is refused at once.

    look     before tokenization: the requests in line already take longer than the deadline ──▶ refused
    judge    a worker has room ──▶ admitted
             the request would be served in time ──▶ it may wait
             a running answer of the last tier may be preempted for it ──▶ the answer is preempted
             otherwise ──▶ refused at once, with the predicted wait

`look` and `judge` are methods of `Deadlines`; the first outcome that applies is chosen.

The work ahead of a request has two parts: the uncached prompt tokens to prefill, and the seconds for which each
answer occupies a batch slot. `WorkerPool` measures the rate at which workers process this work while requests
wait. If too many requests are retries of refused requests, `look` refuses further retries.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf, isfinite
from operator import itemgetter
from typing import Protocol

from controller.frontend.admission.pool import RefusedIds, RetryBudget, WorkerPool
from controller.frontend.admission.queue import Queue, QueuedRequest
from controller.frontend.admission.refusals import TooLate
from controller.frontend.openai.request_head import Call
from controller.frontend.scheduling.scheduler import Scheduler, step_s
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


class Preemptor(Protocol):
    """Preempts running answers for more urgent requests."""

    def may(self, served: str, lineage: Lineage, tier: int) -> bool:
        """Return whether a running answer can be preempted for a request of this tier."""

    def make_room(self, served: str, lineage: Lineage) -> bool:
        """Preempt one answer to make room at its worker. Return False if no answer can be preempted."""

    def in_vain(self, served: str, lineage: Lineage) -> None:
        """Pause preemption, because the last preemption freed no room at the worker."""

    def waits(self, served: str, lineage: Lineage, tier: int) -> bool:
        """Return whether a preempted answer must resume before requests of this tier are admitted."""


@dataclass(eq=False, repr=False)
class RoomFinder:
    """Finds a worker with room for a request, if necessary by preempting a running answer for an urgent request.

    The possible outcomes:

        a worker has room ──▶ its endpoint is returned
        all workers are busy, or none serves now but one will soon ──▶ AllBusy: the request may wait
        a request of the best tier would miss its deadline ──▶ an answer of the last tier is preempted, its endpoint returned
        no worker can serve soon ──▶ a NoWorker that is not AllBusy: the request is refused
    """

    queue_s: float  # a server that is closed (sent Retry-After) for longer than this is not waited for
    table: EndpointTable
    routing: Scheduler
    preemptor: Preemptor

    def find(
        self,
        served: str,
        lineage: Lineage | None = None,
        wanted: RequiredRoom = NOTHING,
        beyond: float = 0.0,
        without: Collection[Key] = (),
    ) -> Endpoint:
        """Return an endpoint of the model or adapter that has room for a request.

        `lineage` restricts the endpoints to one model revision and tokenizer, unless it is None. `wanted` is the room
        that the request needs. Endpoints in `without` are excluded. `beyond` permits more requests than an endpoint's
        batch size: with 0.125, an eighth more.

        Raise AllBusy if the request may wait for room, or another NoWorker if no endpoint can serve the request soon.
        """
        try:
            monitor = self.routing.monitor
            if wanted is monitor.asked and not beyond:  # the common case
                return self.routing.room(served, lineage, without)
            with monitor.asking(wanted, beyond):
                return self.routing.room(served, lineage, without)
        except AllClosed as error:
            if error.wait_s > self.queue_s:
                raise
            raise AllBusy from error  # worth waiting for
        except (NoneRoutable, NoneReachable, NotServed) as error:
            if not self.table.stands_in(served, lineage, without):
                raise
            raise AllBusy from error  # worth waiting for: a suspect is about to serve as the last worker

    def for_queued(self, request: QueuedRequest, beyond: float = 0.0) -> Endpoint:
        """Return an endpoint with room for a queued request. Raise NoWorker if there is none.

        Raise AllBusy if a preempted answer of the same or a better tier must resume first. `beyond` is the parameter of
        `find`.
        """
        served, lineage = request.served, request.lineage
        if lineage is not None and self.preemptor.waits(served, lineage, request.tier):
            raise AllBusy
        return self.find(served, lineage, request.wanted, beyond)

    def for_head(self, request: QueuedRequest, now: float) -> Endpoint:
        """Return an endpoint with room for the first request of a waiting line. Raise NoWorker if there is none.

        Two exceptions apply to a best-tier request that has waited for long. If other frontends share the workers,
        endpoints somewhat above their batch size count too. If no endpoint has room, an answer is preempted if possible.
        """
        used_up = request.used_up(now)
        # If several frontends share the workers, a best-tier request that has waited for a while is sent into a worker's own
        # queue, which is ordered by tier. There it gets the next free slot, even if another frontend's request frees that slot.
        spills = request.tier == 0 and used_up >= SPILLS and self.routing.frontends() != 1
        try:
            return self.for_queued(request, BEYOND if spills else 0.0)
        except AllBusy:
            made = self.preempt(request) if used_up >= PREEMPTS and self.may_preempt(request) else None
            if made is None:
                raise
            return made

    def may_preempt(self, request: QueuedRequest) -> bool:
        """Return whether a running answer may be preempted for this request."""
        served, lineage = request.served, request.lineage
        return lineage is not None and self.preemptor.may(served, lineage, request.tier)

    def preempt(self, request: QueuedRequest, *, first: bool = True) -> Endpoint | None:
        """Preempt a running answer and return the endpoint at which the request now has room.

        Return None if no answer was preempted, or if the worker has no room yet. `first` states that no queued request
        is ahead of `request`. If `first` is false, the request ahead gets the room, and the result is None. Raise
        NoWorker if no worker can serve the request.
        """
        served, lineage, wanted = request.served, request.lineage, request.wanted
        assert lineage is not None
        monitor = self.routing.monitor
        with monitor.asking(wanted):
            made = self.preemptor.make_room(served, lineage)
        try:
            return self.find(served, lineage, wanted) if made and first else None
        except AllBusy:
            self.preemptor.in_vain(served, lineage)
            return None


CAPACITY_S = 0.05  # seconds for which a pool's computed capacity is reused
ONE_WORKER = 1.0  # the weight of one worker in full service


@dataclass(eq=False, repr=False)
class Deadlines:
    """Decides for one frontend whether a request can meet its deadline.

    The decision uses the measured service rate of a worker pool: the workers of one model and lineage (model revision
    and tokenizer).
    """

    settings: FrontendSettings
    table: EndpointTable
    routing: Scheduler
    queue: Queue
    rooms: RoomFinder
    _pools: dict[tuple[str, Lineage], WorkerPool] = field(default_factory=dict)
    _budgets: dict[str, RetryBudget] = field(default_factory=dict)
    _refused: RefusedIds = field(default_factory=RefusedIds)
    # the table's models and adapters when `_lineages` was computed
    _models: Mapping[str, Sequence[Endpoint]] = field(default_factory=dict)
    _adapters: Mapping[str, Sequence[Endpoint]] = field(default_factory=dict)
    _lineages: dict[str, list[Lineage]] = field(default_factory=dict)

    # --- pools

    def pool(self, served: str, lineage: Lineage) -> WorkerPool:
        """Return the pool of the workers of this lineage (model revision and tokenizer) of a model or adapter.

        The pool's measurements are updated to the current time.
        """
        pool, now, state = self._pools.get((served, lineage)), self.routing.now(), self.routing.state
        if pool is None:
            # Until a frontend has measured its actual share of the workers, it assumes an equal share.
            model = self.table.model_of(served)
            first, share = state.first_tokens(model, lineage), 1.0 / max(1, self.routing.frontends())
            pool = WorkerPool(self.queue.line(served, lineage), first, now, share)
            self._pools[served, lineage] = pool
        if now >= pool.capacity_until:
            monitor, pool.capacity_until = self.routing.monitor, now + CAPACITY_S
            pool.capacity = monitor.weight(served, lineage)
        pool.pass_time(now)
        return pool

    def keep(self) -> None:
        """Remove the pools that have no workers and no waiting requests, and the measurements of workers that have left."""
        table, state = self.table, self.routing.state
        endpoints = table.endpoints.values()
        names = {(e.model, e.lineage) for e in endpoints}
        names |= {(adapter, e.lineage) for adapter, there in table.adapters.items() for e in there}
        names |= {name for name, pool in self._pools.items() if len(pool.line) > 0}
        self._pools = {name: pool for name, pool in self._pools.items() if name in names}
        state.keep(names, {e.worker for e in endpoints})
        for pool in self._pools.values():
            pool.capacity_until = 0.0
        self.queue.keep(table.known | table.adapters.keys())

    # --- the requirements of a request

    def look(self, call: Call) -> Lineage:
        """Return the lineage (model revision and tokenizer) that a new request is bound to.

        Count the request in the retry budget. If other requests already wait, raise TooLate for a retry that exceeds
        the budget, and for a deadline that cannot be met. Raise NoWorker if the model has no worker. If other requests
        wait, or if the model has several lineages, also raise NoWorker if no worker serves the model now or soon.
        """
        served, head, now = call.parsed.served, call.head, self.routing.now()
        lineage = self._lineage(served)
        contended = len(self.queue.line(served, lineage)) > 0
        budget = self._budget(call.parsed.model)
        repeat = head.asked.retries > 0 or self._refused.recently_refused(head.id, now)
        if repeat and contended and budget.used_up(now):
            self._refused.add(head.id, now)
            why = "too many requests are retries of refused ones: please retry later"
            raise TooLate("retry_budget", why, inf, should_retry=False)
        budget.note(now, repeat=repeat)
        if contended:
            self.judge(self._request(call, lineage))
        return lineage

    def _budget(self, model: str) -> RetryBudget:
        return self._budgets.setdefault(model, RetryBudget(self.settings.admission.retry_budget))

    def _lineage(self, served: str) -> Lineage:
        """Return the lineage (model revision and tokenizer) that a new request is bound to.

        Raise NoWorker if the model has no worker. If the model has one lineage, return this lineage, even if none of its
        workers serves. If the model has several, raise NoWorker if no worker serves now or soon.
        """
        table = self.table
        if self._models is not table.models or self._adapters is not table.adapters:
            self._models, self._adapters = table.models, table.adapters
            every = {**table.adapters, **table.models}
            self._lineages = {name: [*dict.fromkeys(e.lineage for e in every[name])] for name in every}
        lineages = self._lineages.get(served, [])
        if not lineages:
            raise NotServed
        if len(lineages) == 1:
            return lineages[0]
        try:
            return self.routing.lineage(served)
        except NoWorker:
            for lineage in lineages:
                with suppress(NoWorker):
                    self._capacity_soon(served, lineage)
                    return lineage
            raise

    def _capacity_soon(self, served: str, lineage: Lineage) -> float:
        """Return ONE_WORKER: the capacity that a pool without a serving worker will have soon.

        A worker will serve soon in two cases. In the first, failed canaries have put it in doubt, but it is about to
        return to service, because no other worker of the model serves. In the second, the server behind the worker
        refuses new requests only for a short time (`Retry-After`). Raise NoWorker if no worker will serve soon.
        """
        with suppress(AllBusy):
            self.rooms.find(served, lineage)
        return ONE_WORKER

    def _request(self, call: Call, lineage: Lineage) -> QueuedRequest:
        """Create the queue entry of a request, without its work and the room that it needs.

        The entry contains the deadline, in seconds from the request's arrival. The deadline is set by the client, or else by
        the request's tier, or else by the model's objective.
        """
        head, model, asked = call.head, call.parsed.model, call.head.asked
        tier = self.table.urgency(head.tier)
        client = asked.client(self.settings.admission.fairness_by, call.parsed.user)
        deadline_s, own = asked.deadline_s, asked.deadline_s is not None
        if deadline_s is None:
            usual_ms = self.settings.ttft_deadlines.get(head.tier, self.table.slo(model).slo_ttft_ms)
            deadline_s = inf if usual_ms is None else usual_ms / 1000 * self.table.knobs(model).latency
        line_s = asked.line_s
        if line_s is None:
            line_s = inf if isfinite(deadline_s) else self.settings.admission.queue_s
        return QueuedRequest(
            call.parsed.served, lineage, tier, client, 0.0, call.arrived,
            deadline_s=deadline_s, own_deadline=own, line_s=line_s, id=head.id,
        )  # fmt: skip

    def needs(
        self, call: Call, lineage: Lineage, prompts: Sequence[tuple[int, BlockNames]], answer_max: int
    ) -> QueuedRequest:
        """Return the queue entry of a tokenized request.

        The entry contains the request's estimated work, and the room that it needs at a worker. Raise NoWorker if the
        model has no workers of this lineage (model revision and tokenizer).
        """
        model, group = call.parsed.model, self.routing.group(call.parsed.served, lineage)
        monitor, state, example = self.routing.monitor, self.routing.state, group.endpoints[0]
        unread = sum(state.uncached(group, names, count) for count, names in prompts)
        longest, names = max(prompts, key=itemgetter(0))
        prompt = sum(count for count, _ in prompts)
        expected = monitor.lengths.expected(model, answer_max)
        demand = Demand(unread, prompt, call.parsed.n * len(prompts), expected)
        batch = max(1, int(example.max_batch * self.table.knobs(model).batch_size))
        profile = example.joined.profile
        request = self._request(call, lineage)
        request.work, request.reading_s = work_s(demand, profile, batch), reading_s(unread, profile)
        request.wanted = monitor.required_room(model, longest, answer_max, names, unread)
        return request

    # --- the decision

    def judge(self, request: QueuedRequest, *, room: bool = False) -> bool:
        """Set the deadline of a request and the time until which it may wait.

        Return whether the deadline can be met only by preempting a running answer. `room` states that a worker has room
        for the request. Raise TooLate if the request is refused. Raise NoWorker if no worker serves the model now or
        soon.
        """
        served, lineage = request.served, request.lineage
        assert lineage is not None
        pool = self.pool(served, lineage)
        capacity = pool.capacity if pool.capacity > 0 else self._capacity_soon(served, lineage)
        step = step_s(self.routing.group(served, lineage).endpoints[0])
        verdict = pool.judge(request, self.routing.now(), capacity, step, room=room)
        deadline_s, first_s = verdict.deadline_s, verdict.first_s
        request.deadline_s, request.latest = deadline_s, request.since + verdict.latest_s
        if not verdict.reason:
            return False
        if not room and verdict.in_time_with_room and self.rooms.may_preempt(request):
            return True
        if verdict.reason == "deadline_unattainable":
            self._refused.add(request.id, self.routing.now())
            why = f"the first token cannot arrive within the deadline of {deadline_s:g} s: prefilling this prompt takes longer"
            raise TooLate(verdict.reason, why, inf, should_retry=False)
        shown = f"{first_s:.3g} s" if isfinite(first_s) else "too long"
        why = f"the first token would take {shown}, with a deadline of {deadline_s:g} s"
        raise self._too_late(request, why, first_s - pool.margin(request.tier) * deadline_s)

    def timed_out(self, request: QueuedRequest) -> TooLate:
        """Record the id of a request that was queued for too long, and return the error for its client."""
        assert request.lineage is not None
        pool = self.pool(request.served, request.lineage)
        why = f"no worker became free in time for the deadline of {request.deadline_s:g} s"
        return self._too_late(request, why, pool.wait_s(request, self.routing.now(), pool.capacity))

    def _too_late(self, request: QueuedRequest, why: str, wait_s: float) -> TooLate:
        now = self.routing.now()
        self._refused.add(request.id, now)
        again = not self._budget(self.table.model_of(request.served)).used_up(now)
        return TooLate("deadline", f"{why}: please retry later", wait_s, should_retry=again)
