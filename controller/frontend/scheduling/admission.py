"""Who is let in? Tiers, the knobs of the model's degradation level, and a bounded queue for a free worker.

A request passes, in this order: does anyone serve the model; are new requests accepted; is its tier shed; is some worker not
busy by the thresholds, where there are any; is a worker free, or becomes free within the queue's deadline. Every refusal says
when to come back, and is counted into `RequestsRejected`.
"""

import asyncio
from collections.abc import Callable, Collection
from math import inf
from typing import TypeAlias

from controller.frontend.errors import ApiError, shed, unavailable, unknown_model
from controller.frontend.health.poison import Poisonous
from controller.frontend.scheduling.deadlines import Deadlines, TooLate, WantedRequest, WantedTokens
from controller.frontend.scheduling.overload import ALL_BUSY, OverloadAnswers
from controller.frontend.scheduling.queue import Outcome, Queue, QueueFull, WaitedTooLong
from controller.frontend.scheduling.scheduler import Scheduler
from controller.frontend.settings import FrontendSettings
from controller.router.endpoints import Endpoint, EndpointTable, Key, Lineage
from controller.router.load.monitor import NOTHING, WantedRoom
from controller.router.selection.filter import (
    AllBusy,
    AllClosed,
    NoneReachable,
    NoneRoutable,
    NotServed,
    NoWorker,
)
from events.observations import RequestsRejected


class Reservation:
    """Room for one request, from its admission until it is launched: its prompt may take a while to be read."""

    __slots__ = ("_blocks", "_endpoint", "_freed", "_wanted", "lineage")

    def __init__(
        self, endpoint: Endpoint, freed: Callable[[str], None], wanted: WantedRoom = NOTHING
    ) -> None:
        """Keep room at an endpoint. `wanted`: how much, if that is known already."""
        self._endpoint = endpoint
        self._freed = freed
        self._wanted = wanted
        self._blocks = wanted.held / endpoint.block_tokens
        self.lineage = endpoint.lineage  # what the request is bound to from now on
        endpoint.admit(wanted.unread, self._blocks)

    def again(self) -> "Reservation":
        """Keep the room that was given back, for a generation that could not be sent yet."""
        return Reservation(self._endpoint, self._freed, self._wanted)

    def free(self) -> None:
        """Give the room to the request's generations; whoever waits may look for what they do not take."""
        self._endpoint.release(self._wanted.unread, self._blocks)
        self._freed(self._endpoint.joined.model)


FindsRoom: TypeAlias = Callable[[str, Lineage, WantedRoom, float], Reservation]


class Admission:
    """Lets requests into one frontend, or refuses them."""

    def __init__(
        self,
        frontend: str,
        settings: FrontendSettings,
        table: EndpointTable,
        routing: Scheduler,
        observe: Callable[[RequestsRejected], object],
        answers: OverloadAnswers,
        waited: Callable[[str, Outcome, float], object],
        by_deadline: "Callable[[Queue[Reservation], FindsRoom], Deadlines[Reservation]] | None",
    ) -> None:
        """Let requests in from now on. `waited` is told how each wait for a worker ended, and after how many seconds;
        `by_deadline` makes what lets requests in by their deadlines, where that is wanted."""
        self._frontend = frontend
        self._settings = settings.admission
        self._table = table
        self._routing = routing
        self._monitor = routing.monitor
        self._queue = Queue(self._room, settings.admission.queue_max, waited)
        self.deadlines: Deadlines[Reservation] | None = None
        if by_deadline is not None:
            self.deadlines = by_deadline(self._queue, self._room)
        self.wake = self._queue.wake  # a worker may have become free: let those who wait look
        self._observe = observe
        self._answers = answers
        self._rejected: dict[tuple[str, str, str], int] = {}
        self._window_s = settings.facts.rejected_window_s
        self._reported_at = -inf
        self.open = True

    def _room(
        self,
        model: str,
        lineage: Lineage | None = None,
        wanted: WantedRoom = NOTHING,
        beyond: float = 0.0,
        *,
        without: Collection[Key] = (),
    ) -> Reservation:
        """Return room at a worker, of any lineage or of this one, for a request that takes so much, and that may wait there,
        `beyond` a full batch by so much of one. Raise NoWorker."""
        try:
            if wanted is self._monitor.asked and not beyond:  # nothing is, nearly always
                return Reservation(self._routing.room(model, lineage, without), self.wake, wanted)
            with self._monitor.asking(wanted, beyond):
                return Reservation(self._routing.room(model, lineage, without), self.wake, wanted)
        except AllClosed as error:
            if error.wait_s > self._settings.queue_s:
                raise
            raise AllBusy from error  # worth waiting for
        except (NoneRoutable, NoneReachable, NotServed) as error:
            if not self._table.stands_in(model, lineage, without):
                raise
            raise AllBusy from error  # worth waiting for: a suspect is to serve as the last worker

    def best_waiting(self, model: str, lineage: Lineage) -> int | None:
        """Return the best tier of which anybody waits for a worker of this lineage, where there are lines by tier; None: nobody
        does."""
        return self.deadlines.best_waiting(model, lineage) if self.deadlines is not None else None

    def queued(self, model: str) -> int:
        """Return how many requests wait for a free worker of this model."""
        return self._queue.length(model)

    def waiting(self) -> dict[str, int]:
        """Return the models for which requests wait for a free worker, and how many."""
        return self._queue.waiting()

    def again(
        self, model: str, lineage: Lineage, deadline_s: float, without: Collection[Key] = ()
    ) -> "asyncio.Future[Reservation]":
        """Let a request that was let in and found no room after all wait for it once more, before all others: see `Queue`. It
        does not wait for endpoints `without` which it must do."""
        return self._queue.again(model, deadline_s, lambda: self._room(model, lineage, without=without))

    async def admit(self, model: str, tier: str) -> Reservation:
        """Return room for a request, which its caller frees. Raise ApiError if it is not let in."""
        self._check(model, tier)
        if self._monitor.overloaded(model):
            raise self._overload(model, tier, ALL_BUSY, AllBusy.code)
        try:
            return await self._queue.enter(model, self._settings.queue_s * self._table.knobs(model).latency)
        except (QueueFull, WaitedTooLong) as error:
            raise self.refusal(error, model, tier) from None
        except NoWorker as error:
            raise self.refusal(error, model, tier) from error

    def look(self, deadlines: "Deadlines[Reservation]", wanted: WantedRequest) -> Lineage:
        """Return the lineage that a request is bound to, whose texts are still to be read. Raise ApiError if it is not let in."""
        model, tier = wanted.model, wanted.tier
        self._check(model, tier)
        try:
            return deadlines.look(wanted)
        except (TooLate, NoWorker) as error:
            raise self.refusal(error, model, tier) from None

    async def enter(
        self,
        deadlines: "Deadlines[Reservation]",
        wanted: WantedRequest,
        lineage: Lineage,
        tokens: WantedTokens,
    ) -> tuple[Reservation, float]:
        """Return room for such a request, which its caller frees, and until when its first token is wanted. Raise ApiError if it
        is not let in."""
        try:
            return await deadlines.enter(wanted, lineage, tokens)
        except (TooLate, QueueFull, WaitedTooLong, NoWorker) as error:
            raise self.refusal(error, wanted.model, wanted.tier) from None

    def _check(self, model: str, tier: str) -> None:
        """Raise ApiError where nobody is let in, or nobody of this tier."""
        if not self.open:
            raise self._refused(
                model, tier, "draining", unavailable("this frontend is shutting down", "draining", 1)
            )
        knobs = self._table.knobs(model)
        if not knobs.accept_new:
            why = "the fleet is far short of capacity and accepts no new requests now"
            raise self._refused(model, tier, "not_accepting", self._unavailable(why, "not_accepting"))
        if self._table.sheds(model, tier):
            raise self._refused(model, tier, "capacity_shed", shed(tier))

    def ended(self, model: str, tokens: int) -> None:
        """Take in that an answer of a model that had begun is over: by how many are, who is refused is told when to come back."""
        self._answers.ended(model)
        if self.deadlines is not None:
            self.deadlines.ended(model, tokens)

    def forget(self) -> None:
        """Forget what endpoints that are gone were known by."""
        if self.deadlines is not None:
            self.deadlines.keep()

    def send_away(self) -> None:
        """Refuse those who wait: this frontend ends."""
        self._queue.send_away("no worker became free before this frontend shut down")

    # --- refusals -----------------------------------------------------------------------------------------

    def refusal(
        self, error: TooLate | QueueFull | WaitedTooLong | NoWorker, model: str, tier: str
    ) -> ApiError:
        """Return what a client is told when nobody can take his request."""
        if isinstance(error, TooLate):
            return self._refused(model, tier, error.reason, self._too_late(error))
        if isinstance(error, QueueFull | WaitedTooLong) and (closed := self._closed(model)) is not None:
            error = closed  # their servers say better when to retry than the queue does
        if isinstance(error, QueueFull | WaitedTooLong):
            code = "queue_full" if isinstance(error, QueueFull) else "queue_timeout"
            return self._overload(model, tier, str(error), code)
        if isinstance(error, AllBusy):
            return self._overload(model, tier, ALL_BUSY, error.code)
        if isinstance(error, AllClosed):
            return self._refused(model, tier, error.code, self._answers.closed(error))
        if isinstance(error, NotServed):
            if model not in self._table.known:
                return unknown_model(model)
            error = NoneRoutable()  # there were workers of it, and there will be again
        if isinstance(error, Poisonous):
            return self._refused(model, tier, error.code, ApiError(422, str(error), code=error.code))
        retry = 1 if error.code == "no_reachable_worker" else self._answers.longest_s
        return self._refused(model, tier, error.code, unavailable(str(error), error.code, retry))

    def _closed(self, model: str) -> AllClosed | None:
        """Return why no worker of a model has room, if that is because all of them are closed."""
        try:
            self._routing.room(model)
        except AllClosed as closed:
            return closed
        except NoWorker:
            pass
        return None

    def _too_late(self, error: TooLate) -> ApiError:
        if error.reason == "deadline_unattainable":
            return ApiError(422, str(error), code=error.reason, should_retry=False)
        return self._answers.error_in(str(error), error.reason, error.wait_s, should_retry=error.should_retry)

    def _unavailable(self, message: str, code: str) -> ApiError:
        return unavailable(message, code, self._answers.longest_s)

    def _overload(self, model: str, tier: str, message: str, code: str) -> ApiError:
        return self._refused(model, tier, code, self._answers.error(model, message, code, self.queued(model)))

    def _refused(self, model: str, tier: str, reason: str, error: ApiError) -> ApiError:
        key = (model, reason, tier)
        self._rejected[key] = self._rejected.get(key, 0) + 1
        return error

    def tick(self, now: float) -> bool:
        """Say how many were rejected, where that is due. Return whether it was."""
        if now - self._reported_at < self._window_s:
            return False
        self._reported_at = now
        self.report()
        return True

    def report(self) -> None:
        """Say how many were rejected since the last time."""
        rejected, self._rejected = self._rejected, {}
        for (model, reason, tier), count in rejected.items():
            self._observe(
                RequestsRejected(frontend=self._frontend, model=model, count=count, reason=reason, tier=tier)
            )
