"""The errors of refused requests, with their retry times, and the counts for `RequestsRejected`."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, inf, isinf

from controller.frontend.errors import ApiError, shed, shutting_down, unavailable, unknown_model
from controller.frontend.health.poison import Poisonous
from controller.frontend.scheduling.scheduler import Scheduler
from controller.frontend.scheduling.traffic import TrafficReporter
from controller.frontend.settings import FrontendSettings
from controller.router.endpoints import EndpointTable
from controller.router.selection.filter import AllBusy, AllClosed, NoneRoutable, NotServed, NoWorker
from events.errors import HoldfastError
from events.observations import RequestsRejected

ALL_BUSY = "Service temporarily unavailable: All workers are busy, please retry later"  # the seed's wording
JITTER = 0.25  # share of the retry time by which it is randomly lengthened or shortened
SHORTEST_S = 0.1  # shortest `Retry-After` in seconds for a request that is refused because of its deadline


class NotAdmitted(HoldfastError):
    """A request is refused although workers serve its model."""

    code = "queue_timeout"  # of the API error


class QueueFull(NotAdmitted):
    """The queue is full."""

    code = "queue_full"


class WaitedTooLong(NotAdmitted):
    """No worker became free in time."""


class TooLate(NotAdmitted):
    """A request is refused because of its deadline, or as a retry of a refused one."""

    def __init__(self, code: str, message: str, wait_s: float, *, should_retry: bool = True) -> None:
        """Create the error of a refused request.

        `wait_s` is the time in seconds after which the request would be admitted if no other request arrived; inf if
        unknown.
        """
        super().__init__(message)
        self.code = code
        self.wait_s = wait_s
        self.should_retry = should_retry


@dataclass(eq=False, repr=False)
class Refusals:
    """Builds the API errors of one frontend's refused requests, and counts them for `RequestsRejected`."""

    frontend: str
    settings: FrontendSettings
    table: EndpointTable
    routing: Scheduler
    traffic: TrafficReporter
    dice: Callable[[], float]
    rejected: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # since the last report
    reported_at: float = -inf

    def check(self, served: str, tier: str, *, draining: bool) -> None:
        """Raise ApiError if this frontend drains, or if the fleet rejects all requests of this model or tier.

        `served` is the name of a model or adapter, here and below.
        """
        if draining:
            error = shutting_down()
        elif not self.table.knobs(served).accept_new:
            why = "the fleet is far short of capacity and accepts no new requests at the moment"
            error = unavailable(why, "not_accepting", self.settings.retry_after_s)
        elif self.table.sheds(served, tier):
            error = shed(tier)
        else:
            return
        raise self._counted(error, served, tier)

    def of(self, error: NotAdmitted | NoWorker, served: str, tier: str, wait_s: float) -> ApiError:
        """Return the API error for a request that is not admitted, and count the refusal.

        `wait_s` is the predicted time in seconds until the queued requests have room; inf if unknown.
        """
        if isinstance(error, QueueFull | WaitedTooLong):
            error = self._closed(served) or error  # the servers' Retry-After beats the queue's estimate
        elif isinstance(error, NotServed):
            if served not in self.table.known:
                return unknown_model(served)
            error = NoneRoutable()  # the model had workers before and will have some again
        code, why, status = error.code, str(error), self.settings.overload_status
        longest_s = self.settings.retry_after_s  # also used if the wait is unknown
        match error:
            case TooLate() if code == "deadline_unattainable":
                answer = ApiError(422, why, code=code, should_retry=False)
            case TooLate():
                told_s = min(float(longest_s), self._jittered(max(SHORTEST_S, error.wait_s)))
                again = error.should_retry and told_s < longest_s
                answer = ApiError(status, why, code=code, retry_after_s=told_s, should_retry=again)
            case AllBusy() | NotAdmitted():
                busy = ALL_BUSY if isinstance(error, AllBusy) else why
                whole_s = longest_s if isinf(wait_s) else max(1, ceil(self._jittered(wait_s)))
                answer = ApiError(status, busy, code=code, retry_after_s=min(longest_s, whole_s))
            case AllClosed():  # every server has sent a Retry-After
                answer = ApiError(status, why, code=code, retry_after_s=max(1, ceil(error.wait_s)))
            case Poisonous():
                answer = ApiError(422, why, code=code)
            case _:
                answer = unavailable(why, code, 1 if code == "no_reachable_worker" else longest_s)
        return self._counted(answer, served, tier)

    def _jittered(self, seconds: float) -> float:
        return seconds * (1 + JITTER * (2 * self.dice() - 1))

    def _closed(self, served: str) -> AllClosed | None:
        """Return AllClosed if the servers behind all workers of a model refuse new requests for now, otherwise None.

        A server that has answered with `Retry-After` counts as closed until that time is over.
        """
        try:
            self.routing.room(served)
        except NoWorker as error:
            return error if isinstance(error, AllClosed) else None
        return None

    def _counted(self, error: ApiError, served: str, tier: str) -> ApiError:
        model = self.table.model_of(served)
        if model in self.table.known:  # otherwise it is an adapter that no worker has any more
            self.rejected[model, error.reason, tier] += 1
        return error

    def tick(self, now: float) -> bool:
        """Report the rejected requests if the reporting interval has passed, and return whether it has."""
        due = now - self.reported_at >= self.settings.facts.rejected_window_s
        if due:
            self.reported_at = now
            self.report()
        return due

    def report(self) -> None:
        """Publish one `RequestsRejected` for each model, reason and tier with requests rejected since the last report."""
        rejected, self.rejected = self.rejected, Counter()
        for (model, reason, tier), count in rejected.items():
            self.traffic.rejected(
                RequestsRejected(frontend=self.frontend, model=model, count=count, reason=reason, tier=tier)
            )
