"""Sends attempts to workers and takes them back: everything that counts an attempt hears of its beginning and its end here.

These are the worker's endpoint and the list of what runs there, the router's slots, and this frontend's own breakers.
"""

from collections.abc import Callable, Collection
from math import inf
from typing import Any, Generic, Protocol, TypeVar

from controller.frontend.generations.attempt import Attempt
from controller.frontend.generations.continuation import Continuation
from controller.frontend.generations.output_stats import OutputStats
from controller.frontend.health.poison import ERRORS, PoisonWatch, Suspicion, Way, Where
from controller.frontend.health.request_window import AnswerDraw
from controller.frontend.request.failures import Failure, MigrationBudget
from controller.frontend.request.generation_request import GenerationRequest
from controller.frontend.request_metrics import RequestMetrics
from controller.frontend.scheduling.router import RequestRouter
from controller.frontend.scheduling.running import RunningRequests
from controller.frontend.scheduling.scheduler import explained
from controller.ports import RequestPlane, Sink
from controller.router.endpoints import Endpoint, EndpointTable, Key, WorkerRank
from controller.router.selection.filter import AllBusy, AllClosed, AllTried, Headroom, NoWorker
from controller.router.selection.selector import Selection
from events.broker_users import account_of
from events.intrusion.reports import ReportIntrusion, not_reported
from events.wire import Why

_FRESH, _HELD = Headroom.FRESH, Headroom.HELD  # to look a member of an enum up takes as long as a call


class Dispatched(Protocol):
    """What is sent: a generation."""

    @property
    def request(self) -> GenerationRequest: ...
    @property
    def continuation(self) -> Continuation: ...
    @property
    def output(self) -> Sink: ...
    @property
    def stats(self) -> OutputStats: ...
    @property
    def budget(self) -> MigrationBudget: ...
    @property
    def last_attempt(self) -> Attempt | None: ...


G = TypeVar("G", bound=Dispatched)


class Dispatcher(Generic[G]):
    """The attempts of one frontend."""

    def __init__(
        self,
        table: EndpointTable,
        routing: RequestRouter,
        plane: RequestPlane,
        poison: PoisonWatch,
        running: RunningRequests[G],
        metrics: RequestMetrics,
        now: Callable[[], float],
        freed: Callable[[str], None],
    ) -> None:
        """Send nothing yet. `freed` is told the model of a worker at which an attempt has ended."""
        self._table = table
        self._routing = routing
        self.scheduler = routing.scheduler
        self._plane = plane
        self._poison = poison
        self.heard = poison.heard  # what other frontends say of poison requests
        self._breakers = poison.breakers
        self._running = running
        self._metrics = metrics
        self._now = now
        self._freed = freed
        self.report: ReportIntrusion = not_reported

    # --- where to -----------------------------------------------------------------------------------------

    def choose(self, generation: G, missed: set[Key], planned: Endpoint | None) -> Selection:
        """Return where it was `planned` to go, or the best worker that has not been tried; if there is none, one to which
        only the connection had failed, other than those `missed` just now. Raise NoWorker; Held if it has to wait although there
        are workers."""
        request, budget, routing = generation.request, generation.budget, self._routing
        output = generation.continuation.accepted
        declined = budget.declined and budget.closed_to(begun=generation.stats.first_at is not None)
        where = self._poison.where(request)
        if where is not None and (planned is None or planned is not where.endpoint):  # hardly ever
            planned = None
            if (found := self._guarded(generation, where, missed | declined)) is not None:
                return found
        if planned is not None and declined and planned.key in declined:
            planned = None
        if planned is not None and routing.has_room(planned, _HELD):
            return routing.at(planned, request, output)
        first = generation.last_attempt is None
        try:
            tried = budget.tried | declined if declined else budget.tried
            try:
                return routing.route(request, tried, output, room=_FRESH if first else _HELD)
            except AllBusy:
                if not first:
                    raise
                # it was let in: one answer of several may find none any more, and goes where a worker can hold it
                return routing.route(request, tried, output)
        except AllClosed as closed:
            if declined:
                closed.wait_s = min(closed.wait_s, self._closed_s(declined))
            raise
        except AllTried:
            try:
                return routing.route(request, budget.failed | missed | declined, output)
            except AllTried:
                if declined:
                    raise AllClosed(self._closed_s(declined), inf) from None
                raise

    def _guarded(self, generation: G, where: Where, missed: Collection[Key]) -> Selection | None:
        """Return where a request goes that may not go anywhere; None: anywhere, after all. Raise Held."""
        request, routing = generation.request, self._routing
        tried = generation.budget.tried | frozenset(missed)
        output, only = generation.continuation.accepted, where.endpoint
        try:
            if only is None:
                room = _FRESH if generation.last_attempt is None and not where.waits else _HELD
                return routing.route(request, tried | where.avoid, output, room=room)
            if only.key not in tried:
                routing.room_at(only, request.lineage, request.tokens_max)
                return routing.at(only, request, output)
        except NoWorker:
            pass
        if where.waits and routing.targets(request):
            raise self._poison.hold(request)
        return None

    # --- beginning ----------------------------------------------------------------------------------------

    def send(self, generation: G, choice: Selection, *, paid: bool) -> Attempt:
        """Send a request to the worker that was chosen. Raise WorkerUnreachable."""
        endpoint, rank, request = choice.endpoint, choice.holder.rank, generation.request
        asked = generation.continuation.request(endpoint, rank)
        stream = self._plane.open(endpoint.worker, endpoint.instance, asked, generation.output)
        first = generation.last_attempt is None
        why = explained(choice) if first and request.overrides.explain else None
        claimed = self.scheduler.claimed(choice) if first and choice.overlap_blocks else 0
        slot = self.scheduler.begin(choice, request, generation.continuation.accepted)
        return self._begin(generation, endpoint, rank, stream, slot, paid, why, claimed)

    def adopt(self, generation: G, endpoint: Endpoint, rank: int, stream: int) -> Attempt:
        """Take in that a worker goes on with a request under this stream, with the KV cache that it has taken over."""
        slot = self.scheduler.carry(endpoint, rank, generation.request, generation.continuation.accepted)
        return self._begin(generation, endpoint, rank, stream, slot, False, None)

    def _begin(
        self,
        generation: G,
        endpoint: Endpoint,
        rank: int,
        stream: int,
        slot: int,
        paid: bool,
        why: dict[str, Any] | None,
        claimed: int = 0,
    ) -> Attempt:
        request, last = generation.request, generation.last_attempt
        self._poison.sent(request, endpoint, slot)
        self._running.begin(generation, endpoint, len(request.prompt) + request.sampling.max_tokens)
        return Attempt(
            endpoint,
            rank if endpoint.ranks > 1 else None,
            stream,
            slot,
            1 if last is None else last.number + 1,
            self._table.number,
            self._breakers.routed(endpoint.key),
            paid,
            last,
            claimed,
            why,
        )

    # --- ending -------------------------------------------------------------------------------------------

    def cancel(self, attempt: Attempt | None, why: Why = "gone") -> None:
        """Tell the worker, if there is one, that nobody reads its stream any more, and hear nothing more of it."""
        if attempt is None:
            return
        endpoint = attempt.endpoint
        if why == "elsewhere" and self._table.drains(endpoint):
            why = "drained"
        self._plane.cancel(endpoint.worker, attempt.stream, why)

    def prompt_read(self, generation: G, attempt: Attempt) -> None:
        """The first token of an attempt has come."""
        self.scheduler.read(attempt.slot)
        cached = generation.stats.cached_tokens
        if attempt.claimed and cached is not None:
            holder = WorkerRank(*attempt.endpoint.key, attempt.rank or 0)
            self.scheduler.compare(holder, attempt.claimed, cached)
        self._poison.read(generation.request, attempt.endpoint.key)

    def end(self, generation: G, attempt: Attempt) -> None:
        """An attempt has left its worker, however it ended."""
        self._poison.left(generation.request, attempt.slot)
        self._running.end(generation, attempt.endpoint)
        self.scheduler.end(attempt.slot)
        self._freed(generation.request.model)

    def served(
        self, request: GenerationRequest, attempt: Attempt, stats: OutputStats, *, alone: bool
    ) -> None:
        """An answer was completed by this attempt. `alone`: no other has brought any of it; else its times say nothing of this
        worker, also where the others were with the same one."""
        self._poison.served(request)
        endpoint, count, first_at = attempt.endpoint, stats.counted, stats.first_at
        ttft = itl = None
        if alone and first_at is not None:
            ttft = first_at - stats.began_at
            itl = (self._now() - first_at) / (count - 1) if count > 1 else None
            self._metrics.served(endpoint.worker, len(request.prompt), ttft, itl)
        self._breakers.served(
            endpoint.key, count, ttft, itl, attempt.routed_under, attempt.breaker_epoch,
            model=request.model,
            drawn=AnswerDraw(request.sampling, stats.weighed, stats.unlikely) if alone else None,
        )  # fmt: skip

    def blame(self, attempt: Attempt, failure: Failure) -> None:
        """An attempt failed by its worker's fault."""
        key = attempt.endpoint.key
        self._breakers.failed(
            key, failure.reason, attempt.routed_under, attempt.breaker_epoch, one_stream=failure.one_stream
        )

    def judge(self, generation: G, attempt: Attempt, failure: Failure, *, begun: bool) -> Suspicion:
        """An attempt has failed, before (or after: `begun`) its first token: count it against its worker, if it is to blame.
        Return what it says of the request itself."""
        request, endpoint, reason = generation.request, attempt.endpoint, failure.reason
        poison, key, under = self._poison, endpoint.key, attempt.routed_under
        if reason == "invalid_output":  # its stream is open: nothing of it is heard any more
            self.cancel(attempt, "elsewhere")
            who = account_of(endpoint.worker, endpoint.joined.account)
            self.report(who, f"send {failure.detail}", worker=endpoint.worker)
        way = Way.of(reason, failure.detail, len(generation.continuation.accepted))
        alone = reason in ERRORS or failure.one_stream  # its worker goes on
        if not failure.kind.blames or (alone and poison.repeats(request, key, way)):
            self.unjudged(attempt, has_output=begun)
        else:
            self.blame(attempt, failure)
        connected = self._plane.load(endpoint.worker) is not None
        if not begun and poison.brings_down(reason, key, one_stream=failure.one_stream, connected=connected):
            poison.fell(request, endpoint, attempt.slot, reason)
            return Suspicion.SUSPECT
        if alone:
            return poison.failed(request, key, way, under)
        return Suspicion.NONE

    def turned_away(self, generation: G, attempt: Attempt) -> None:
        """A worker had no room for an attempt: nothing speaks against either, and it has cost nothing."""
        generation.budget.spent -= attempt.paid
        if self._closed_s((attempt.endpoint.key,)):
            generation.budget.declined |= {attempt.endpoint.key}
        self._routing.refused(attempt.endpoint)
        self.unjudged(attempt, has_output=False)

    def _closed_s(self, keys: Collection[Key]) -> float:
        """Return the least of the times, in seconds, for which these endpoints take no new requests; 0: none is closed."""
        loads = [self._plane.external_load(worker) for worker, _ in keys]
        return min((load.closed_s for load in loads if load is not None and load.closed_s), default=0.0)

    def unjudged(self, attempt: Attempt | None, *, has_output: bool) -> None:
        """An attempt, if there is one, ends through no fault of its worker: its client has left, or was mistaken."""
        if attempt is not None:
            tell = self._breakers.had_output if has_output else self._breakers.had_no_output
            tell(attempt.endpoint.key, attempt.breaker_epoch)
