"""Starts and ends attempts on workers, and updates every component that counts attempts.

An attempt is one sending of a request to a worker. The counting components are the endpoint's counters, the running
requests, the slot tracker and the local breakers.
"""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf

from controller.frontend.dispatch.live_request import Dispatch, LiveRequest, RunningRequests
from controller.frontend.health.local_breakers import AnswerDraw, LocalBreakers
from controller.frontend.health.poison import PoisonWatch, Way, Where
from controller.frontend.request.effects import SelectWorker
from controller.frontend.request.events import ConnectFailed, NoWorkerFound, Sent
from controller.frontend.request.failures import ERRORS, Failure, Suspicion
from controller.frontend.request_metrics import RequestMetrics
from controller.frontend.scheduling.scheduler import Scheduler, explained
from controller.ports import RequestPlane, WorkerUnreachable
from controller.router.endpoints import Endpoint, EndpointTable, Key, WorkerRank
from controller.router.selection.filter import AllBusy, AllClosed, AllTried, Headroom, NoWorker
from controller.router.selection.selector import Selection
from events.broker_users import account_of
from events.intrusion.reports import Intrusions
from events.wire import Why


@dataclass(eq=False, repr=False)
class Dispatcher:
    """Sends attempts to workers and counts the running attempts.

    A failed attempt is counted against its worker or its request.
    """

    table: EndpointTable
    routing: Scheduler
    plane: RequestPlane
    poison: PoisonWatch
    breakers: LocalBreakers
    running: RunningRequests
    metrics: RequestMetrics
    intrusions: Intrusions
    # the error of the last request for which no worker was found
    no_worker: NoWorker = field(default_factory=NoWorker)

    def __post_init__(self) -> None:
        self.state = self.routing.state

    def route(
        self, live: LiveRequest, effect: SelectWorker, now: float
    ) -> Sent | ConnectFailed | NoWorkerFound:
        """Choose a worker and send an attempt to it.

        Return the event for the state machine: sent, connect failed, or no worker found.
        """
        try:
            choice = self.choose(live, effect)
        except NoWorker as error:
            self.no_worker, request = error.with_traceback(None), live.request
            stands_in = self.table.stands_in(request.served, request.lineage, live.state.failed)
            reopens_s = error.reopens_s if isinstance(error, AllClosed) else 0.0
            return NoWorkerFound(error.code, stands_in, reopens_s)
        try:
            self.send(live, choice, now)
        except WorkerUnreachable:
            return ConnectFailed(choice.endpoint.key)
        return Sent(choice.endpoint.server)

    # --- choosing a worker ----------------------------------------------------------------------------------

    def choose(self, live: LiveRequest, route: SelectWorker) -> Selection:
        """Return the planned worker if it has room, otherwise the best worker that has not been tried.

        If all workers were tried, return the best of those to which only the connection failed. Raise Held if the
        request may crash workers and must wait although workers are available. Raise another NoWorker if no worker
        can serve the request.
        """
        request, routing, output = live.request, self.routing, live.accepted
        declined = route.declined
        planned = self.table.endpoints.get(route.planned) if route.planned is not None else None
        if planned is not None and not planned.has(request.adapter):
            planned = None
        where = self.poison.where(request)
        if where is not None and (planned is None or planned is not where.endpoint):  # rare
            planned = None
            if (found := self._guarded(live, where, route)) is not None:
                return found
        if planned is not None and planned.key not in declined and routing.has_room(planned, Headroom.HELD):
            return routing.choose([planned], request, output)
        try:
            return self._best(live, route.avoid)
        except AllClosed as closed:
            if declined:
                closed.wait_s = min(closed.wait_s, self.closed_s(declined))
            raise
        except AllTried:
            try:
                return routing.route(request, route.fallback, output)
            except AllTried:
                if declined:
                    raise AllClosed(self.closed_s(declined), inf) from None
                raise

    def _best(self, live: LiveRequest, avoid: Collection[Key]) -> Selection:
        """Return the best worker outside `avoid`. Raise NoWorker if there is none."""
        request, routing, output, first = live.request, self.routing, live.accepted, live.state.last is None
        try:
            return routing.route(request, avoid, output, room=Headroom.FRESH if first else Headroom.HELD)
        except AllBusy:
            if not first:
                raise
            # The request was admitted, but no slot may be free for this one of its answers. Let a worker queue this
            # answer.
            return routing.route(request, avoid, output)

    def _guarded(self, live: LiveRequest, where: Where, route: SelectWorker) -> Selection | None:
        """Return the worker for a request that may crash workers. Return None if the request may go to any worker.

        `where` states which workers may get the request, and whether the request must wait if none of them is
        available. Raise Held if it must wait.
        """
        request, routing, output, only = live.request, self.routing, live.accepted, where.endpoint
        tried = route.avoid | route.missed
        with suppress(NoWorker):
            if only is None:
                room = Headroom.FRESH if live.state.last is None and not where.waits else Headroom.HELD
                return routing.route(request, tried | where.avoid, output, room=room)
            if only.key not in tried:
                routing.room_at(only, request.lineage, request.tokens_max, request.adapter)
                return routing.choose([only], request, output)
        if where.waits and routing.targets(request):
            raise self.poison.hold(request)
        return None

    # --- starting an attempt --------------------------------------------------------------------------------

    def send(self, live: LiveRequest, choice: Selection, now: float) -> None:
        """Send a request to the chosen worker as a new attempt. Raise WorkerUnreachable if the worker is not connected."""
        endpoint, rank, request, state = choice.endpoint, choice.holder.rank, live.request, self.state
        if request.grammar is not None:
            live.drop_unfinished()
        generate = live.continuation.request(endpoint, rank)
        stream = self.plane.open(endpoint.worker, endpoint.instance, generate, live)
        claimed = 0
        if live.state.last is None:
            if request.overrides.explain:
                live.answer.explained = explained(choice)
            if choice.overlap_blocks:
                claimed = state.claimed(choice)
        slot = state.begin(choice, request, live.accepted)
        self._begin(live, (endpoint, rank), stream, slot, now, claimed)

    def adopt(self, live: LiveRequest, endpoint: Endpoint, rank: int, stream: int, now: float) -> None:
        """Make the target of a KV transfer the current worker of a request.

        The answer continues in the target's stream with the number `stream`.
        """
        slot = self.state.add_arrived(endpoint, rank, live.request, live.accepted)
        self._begin(live, (endpoint, rank), stream, slot, now)

    def _begin(
        self,
        live: LiveRequest,
        at: tuple[Endpoint, int],
        stream: int,
        slot: int,
        now: float,
        claimed: int = 0,
    ) -> None:
        """Make an attempt the current one, and count it at its worker and DP rank.

        `at` is the worker and DP rank, and `slot` the request's number in the slot tracker. `claimed` is the number
        of prompt tokens that KV events report as cached at the worker.
        """
        request, (endpoint, rank) = live.request, at
        self.poison.sent(request, endpoint, slot)
        self.running.begin(live, endpoint, len(request.prompt) + live.max_tokens)
        epoch, before = self.breakers.routed(endpoint.key), live.answer.endpoint
        shown = rank if endpoint.ranks > 1 else None
        live.begin(Dispatch(endpoint, shown, stream, slot, self.table.number, epoch, before, claimed), now)

    # --- ending an attempt ----------------------------------------------------------------------------------

    def cancel(self, dispatch: Dispatch, why: Why = "gone") -> None:
        """Cancel an attempt's stream at its worker, and stop reading the stream. `why` is sent to the worker."""
        endpoint = dispatch.endpoint
        if why == "elsewhere" and self.table.drains(endpoint):
            why = "drained"
        self.plane.cancel(endpoint.worker, dispatch.stream, why)

    def prefill_done(self, live: LiveRequest, dispatch: Dispatch, now: float) -> None:
        """Record that an attempt has produced its first token, which means that its prefill is complete."""
        self.state.read(dispatch.slot, now)
        cached = live.answer.cached_tokens
        if dispatch.claimed and cached is not None:
            holder = WorkerRank(*dispatch.endpoint.key, dispatch.rank or 0)
            self.state.compare(holder, dispatch.claimed, cached)
        self.poison.read(live.request, dispatch.endpoint.key)

    def end(self, live: LiveRequest, dispatch: Dispatch, now: float) -> None:
        """Record that an attempt no longer runs on its worker, whatever its outcome."""
        self.poison.left(live.request, dispatch.slot)
        self.running.end(live, dispatch.endpoint)
        self.state.end(dispatch.slot, now)

    def served(self, live: LiveRequest, dispatch: Dispatch, now: float, *, alone: bool) -> None:
        """Record that an attempt completed an answer.

        `alone` states that no other attempt produced any part of the answer. If false, the token times are not used
        to measure the worker, even if the other attempts ran on the same worker.
        """
        request, stats, endpoint = live.request, live.stats, dispatch.endpoint
        self.poison.served(request)
        count, first_at = stats.counted, stats.first_at
        ttft = itl = None
        if alone and first_at is not None:
            ttft = first_at - live.state.began_at
            itl = (now - first_at) / (count - 1) if count > 1 else None
            self.metrics.served(endpoint.worker, len(request.prompt), ttft, itl)
        self.breakers.served(
            endpoint.key, count, ttft, itl, dispatch.routed_under, dispatch.breaker_epoch,
            model=request.model,
            drawn=AnswerDraw(request.sampling, stats.weighed, stats.unlikely) if alone else None,
        )  # fmt: skip

    def count_failure(self, dispatch: Dispatch, failure: Failure) -> None:
        """Count a failed attempt against its worker in the local breaker."""
        key = dispatch.endpoint.key
        self.breakers.failed(
            key, failure.reason, dispatch.routed_under, dispatch.breaker_epoch, one_stream=failure.one_stream
        )

    def judge(self, live: LiveRequest, dispatch: Dispatch, failure: Failure, *, begun: bool) -> Suspicion:
        """Count a failed attempt against its worker, if the worker is at fault.

        Return whether the request itself may have caused the failure. `begun` states that the attempt failed after
        its first token.
        """
        request, endpoint, reason = live.request, dispatch.endpoint, failure.reason
        poison, key = self.poison, endpoint.key
        if reason == "invalid_output":  # the stream is still open, but no longer read
            self.cancel(dispatch, "elsewhere")
            account = account_of(endpoint.worker, endpoint.joined.account)
            self.intrusions.report(account, f"send {failure.detail}", worker=endpoint.worker)
        way = Way.of(reason, failure.detail, len(live.accepted))
        alone = reason in ERRORS or failure.one_stream  # only this request failed: the worker keeps running
        if not failure.kind.blames or (alone and poison.repeats(request, key, way)):
            self.unjudged(dispatch, has_output=begun)
        else:
            self.count_failure(dispatch, failure)
        connected = self.plane.load(endpoint.worker) is not None
        if poison.brings_down(reason, key, one_stream=failure.one_stream, connected=connected):
            if not begun:
                poison.fell(request, endpoint, dispatch.slot, reason)
                return Suspicion.SUSPECT
            poison.fell_by_itself(key, reason)
        if alone:
            return poison.failed(request, key, way, dispatch.routed_under)
        return Suspicion.NONE

    def turned_away(self, dispatch: Dispatch) -> None:
        """Record an attempt that its worker rejected for lack of capacity. A rejection does not count as a failure.

        The worker gets no new request until its next load report.
        """
        endpoint = dispatch.endpoint
        endpoint.refused_at = self.plane.external_load(endpoint.worker)
        self.unjudged(dispatch, has_output=False)

    def closed_s(self, keys: Collection[Key]) -> float:
        """Return the shortest remaining `Retry-After` time, in seconds, of the servers behind these workers.

        A server gets no requests until its time is over. Return 0 if no server has such a time.
        """
        loads = [self.plane.external_load(worker) for worker, _ in keys]
        return min((load.closed_s for load in loads if load is not None and load.closed_s), default=0.0)

    def unjudged(self, dispatch: Dispatch, *, has_output: bool) -> None:
        """Record an attempt that ended without a fault of its worker.

        Examples are a client that has disconnected, and an invalid request.
        """
        self.breakers.unjudged(dispatch.endpoint.key, dispatch.breaker_epoch, has_output=has_output)
