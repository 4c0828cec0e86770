"""Who is let in? Tiers, the knobs of the model's degradation level, and a bounded queue for a free worker.

A request passes, in this order: does anyone serve the model; are new requests accepted; is its tier shed; is some worker not
busy by the thresholds, where there are any; is a worker free, or becomes free within the queue's deadline. Every refusal says
when to come back, and is counted into `RequestsRejected`.
"""

import asyncio
from collections.abc import Callable

from controller.frontend.errors import ApiError, shed, unavailable, unknown_model
from controller.frontend.health.poison import Poisonous
from controller.frontend.scheduling.overload import ALL_BUSY, OverloadAnswers
from controller.frontend.scheduling.queue import Outcome, Queue, QueueFull, WaitedTooLong
from controller.frontend.settings import AdmissionSettings
from controller.router.endpoints import Endpoint, EndpointTable, Lineage
from controller.router.selection.filter import AllBusy, NoneRoutable, NotServed, NoWorker
from events.fact import Observation
from events.observations import RequestsRejected


class Reservation:
    """Room for one request, from its admission until it is launched: its prompt may take a while to be read."""

    __slots__ = ("_endpoint", "_freed", "lineage")

    def __init__(self, endpoint: Endpoint, freed: Callable[[str], None]) -> None:
        self._endpoint = endpoint
        self._freed = freed
        self.lineage = endpoint.lineage  # what the request is bound to from now on
        endpoint.admit()

    def again(self) -> "Reservation":
        """Keep the room that was given back, for a generation that could not be sent yet."""
        return Reservation(self._endpoint, self._freed)

    def free(self) -> None:
        """Give the room to the request's generations; whoever waits may look for what they do not take."""
        self._endpoint.release()
        self._freed(self._endpoint.joined.model)


class Admission:
    """Lets requests into one frontend, or refuses them."""

    def __init__(
        self,
        frontend: str,
        settings: AdmissionSettings,
        table: EndpointTable,
        find: Callable[[str, Lineage | None], Endpoint],
        observe: Callable[[Observation], object],
        answers: OverloadAnswers,
        waited: Callable[[str, Outcome, float], object],
        overloaded: Callable[[str], bool],
    ) -> None:
        """Let requests in from now on. `find` returns a worker with room, of any lineage or of one, or raises NoWorker; `waited`
        is told how each wait for one ended, and after how many seconds; `overloaded` says whether every worker of a model is busy
        by the thresholds that are set."""
        self._frontend = frontend
        self._settings = settings
        self._table = table
        self._find = find
        self._queue = Queue(
            lambda model: Reservation(find(model, None), self.wake), settings.queue_max, waited
        )
        self.wake = self._queue.wake  # a worker may have become free: let those who wait look
        self._observe = observe
        self._answers = answers
        self._overloaded = overloaded
        self._rejected: dict[tuple[str, str, str], int] = {}
        self.open = True

    def queued(self, model: str) -> int:
        """Return how many requests wait for a free worker of this model."""
        return self._queue.length(model)

    def waiting(self) -> dict[str, int]:
        """Return the models for which requests wait for a free worker, and how many."""
        return self._queue.waiting()

    def again(self, model: str, lineage: Lineage, deadline_s: float) -> "asyncio.Future[Reservation]":
        """Let a request that was let in and found no room after all wait for it once more, before all others: see `Queue`."""
        return self._queue.again(
            model, deadline_s, lambda: Reservation(self._find(model, lineage), self.wake)
        )

    async def admit(self, model: str, tier: str) -> Reservation:
        """Return room for a request, which its caller frees. Raise ApiError if it is not let in."""
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
        if self._overloaded(model):
            raise self._overload(model, tier, ALL_BUSY, AllBusy.code)
        try:
            return await self._queue.enter(model, self._settings.queue_s * knobs.latency)
        except (QueueFull, WaitedTooLong) as error:
            raise self.refusal(error, model, tier) from None
        except NoWorker as error:
            raise self.refusal(error, model, tier) from error

    def ended(self, model: str) -> None:
        """Take in that an answer of a model that had begun is over: by how many are, who is refused is told when to come back."""
        self._answers.ended(model)

    def send_away(self) -> None:
        """Refuse those who wait: this frontend ends."""
        self._queue.send_away("no worker became free before this frontend shut down")

    # --- refusals -----------------------------------------------------------------------------------------

    def refusal(self, error: QueueFull | WaitedTooLong | NoWorker, model: str, tier: str) -> ApiError:
        """Return what a client is told when nobody can take his request."""
        if isinstance(error, QueueFull | WaitedTooLong):
            code = "queue_full" if isinstance(error, QueueFull) else "queue_timeout"
            return self._overload(model, tier, str(error), code)
        if isinstance(error, AllBusy):
            return self._overload(model, tier, ALL_BUSY, error.code)
        if isinstance(error, NotServed):
            if model not in self._table.known:
                return unknown_model(model)
            error = NoneRoutable()  # there were workers of it, and there will be again
        if isinstance(error, Poisonous):
            return self._refused(model, tier, error.code, ApiError(422, str(error), code=error.code))
        retry = 1 if error.code == "no_reachable_worker" else self._answers.longest_s
        return self._refused(model, tier, error.code, unavailable(str(error), error.code, retry))

    def _unavailable(self, message: str, code: str) -> ApiError:
        return unavailable(message, code, self._answers.longest_s)

    def _overload(self, model: str, tier: str, message: str, code: str) -> ApiError:
        return self._refused(model, tier, code, self._answers.error(model, message, code, self.queued(model)))

    def _refused(self, model: str, tier: str, reason: str, error: ApiError) -> ApiError:
        key = (model, reason, tier)
        self._rejected[key] = self._rejected.get(key, 0) + 1
        return error

    def report(self) -> None:
        """Say how many were rejected since the last time."""
        rejected, self._rejected = self._rejected, {}
        for (model, reason, tier), count in rejected.items():
            self._observe(
                RequestsRejected(frontend=self._frontend, model=model, count=count, reason=reason, tier=tier)
            )
