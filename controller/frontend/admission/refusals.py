"""The refusals of one frontend: the error that a client gets, when to retry, and the counts in `RequestsRejected`."""

from collections import Counter
from dataclasses import dataclass, field
from math import inf

from controller.frontend.errors import ApiError, shed, unavailable, unknown_model
from controller.frontend.health.poison import Poisonous
from controller.frontend.scheduling.overload import ALL_BUSY, OverloadAnswers
from controller.frontend.scheduling.scheduler import Scheduler
from controller.frontend.scheduling.traffic import TrafficReporter
from controller.frontend.settings import FactSettings
from controller.router.endpoints import EndpointTable
from controller.router.selection.filter import AllBusy, AllClosed, NoneRoutable, NotServed, NoWorker
from events.errors import HoldfastError
from events.observations import RequestsRejected


class NotAdmitted(HoldfastError):
    """A request is refused although workers serve its model."""

    code = "queue_timeout"  # of the answer


class QueueFull(NotAdmitted):
    """As many requests wait for a worker as may."""

    code = "queue_full"


class WaitedTooLong(NotAdmitted):
    """No worker became free in time."""


class TooLate(NotAdmitted):
    """A request is refused because of its deadline, or as a repeat."""

    def __init__(self, code: str, message: str, wait_s: float, *, should_retry: bool = True) -> None:
        """`wait_s`: until it would be admitted, if no others arrived; inf: unknown."""
        super().__init__(message)
        self.code = code
        self.wait_s = wait_s
        self.should_retry = should_retry


@dataclass(eq=False)
class Refusals:
    """The refusals of one frontend."""

    frontend: str
    settings: FactSettings
    table: EndpointTable
    routing: Scheduler
    answers: OverloadAnswers
    traffic: TrafficReporter
    rejected: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # since the last report
    reported_at: float = -inf

    def check(self, model: str, tier: str, *, draining: bool) -> None:
        """Raise ApiError if no request is admitted, or none of this tier."""
        if draining:
            code, error = "draining", unavailable("this frontend is shutting down", "draining", 1)
        elif not self.table.knobs(model).accept_new:
            why, code = "the fleet is far short of capacity and accepts no new requests now", "not_accepting"
            error = unavailable(why, code, self.answers.longest_s)
        elif self.table.sheds(model, tier):
            code, error = "capacity_shed", shed(tier)
        else:
            return
        raise self._refused(model, tier, code, error)

    def of(self, error: NotAdmitted | NoWorker, model: str, tier: str, before: int) -> ApiError:
        """Return what a client is told that is refused while `before` requests wait, and count it."""
        if isinstance(error, QueueFull | WaitedTooLong):
            error = (
                self._closed(model) or error
            )  # their servers know better when to retry than the queue does
        elif isinstance(error, NotServed):
            if model not in self.table.known:
                return unknown_model(model)
            error = NoneRoutable()  # it had workers, and will have some again
        code, why, answers = error.code, str(error), self.answers
        match error:
            case TooLate() if code == "deadline_unattainable":
                answer = ApiError(422, why, code=code, should_retry=False)
            case TooLate():
                answer = answers.error_in(why, code, error.wait_s, should_retry=error.should_retry)
            case AllBusy() | NotAdmitted():
                busy = ALL_BUSY if isinstance(error, AllBusy) else why
                answer = answers.error(model, busy, code, before)
            case AllClosed():
                answer = answers.closed(error)
            case Poisonous():
                answer = ApiError(422, why, code=code)
            case _:
                answer = unavailable(why, code, 1 if code == "no_reachable_worker" else answers.longest_s)
        return self._refused(model, tier, code, answer)

    def _closed(self, model: str) -> AllClosed | None:
        """Return why no worker of a model has room, if that is because all of their servers are closed."""
        try:
            self.routing.room(model)
        except AllClosed as closed:
            return closed
        except NoWorker:
            pass
        return None

    def _refused(self, model: str, tier: str, reason: str, error: ApiError) -> ApiError:
        self.rejected[model, reason, tier] += 1
        return error

    def tick(self, now: float) -> bool:
        """Report how many were rejected, if that is due. Return whether it was."""
        if now - self.reported_at < self.settings.rejected_window_s:
            return False
        self.reported_at = now
        self.report()
        return True

    def report(self) -> None:
        """Report how many were rejected since the last report."""
        rejected, self.rejected = self.rejected, Counter()
        for (model, reason, tier), count in rejected.items():
            self.traffic.rejected(
                RequestsRejected(frontend=self.frontend, model=model, count=count, reason=reason, tier=tier)
            )
