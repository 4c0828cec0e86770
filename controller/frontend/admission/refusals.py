"""The refusals of one frontend: the error that a client gets, when to retry, and the counts in `RequestsRejected`."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, inf

from controller.frontend.errors import ApiError, shed, unavailable, unknown_model
from controller.frontend.health.poison import Poisonous
from controller.frontend.scheduling.scheduler import Scheduler
from controller.frontend.scheduling.traffic import TrafficReporter
from controller.frontend.settings import FactSettings
from controller.router.endpoints import EndpointTable
from controller.router.selection.filter import AllBusy, AllClosed, NoneRoutable, NotServed, NoWorker
from events.errors import HoldfastError
from events.observations import RequestsRejected

ALL_BUSY = "Service temporarily unavailable: All workers are busy, please retry later"  # the seed's words
WINDOW_S = 10.0
ENDS_MAX = 512  # remembered per model: at a higher rate the window is shorter
JITTER = 0.25  # either way
SHORTEST_S = 0.1  # that is told where it is known to the millisecond


class OverloadAnswers:
    """One frontend's refusals for want of room."""

    def __init__(
        self, now: Callable[[], float], dice: Callable[[], float], longest_s: int, status: int
    ) -> None:
        """`longest_s`: the longest wait that is told, and what is told where nothing has ended lately; the shortest is a second.
        `status`: of the answers."""
        self.longest_s = longest_s
        self._now = now
        self._dice = dice
        self._status = status
        self._ends: dict[str, deque[float]] = {}

    def ended(self, model: str) -> None:
        """Take in that an answer of a model that had begun is over, so that its place is free."""
        ends = self._ends.get(model)
        if ends is None:
            ends = self._ends[model] = deque(maxlen=ENDS_MAX)
        ends.append(self._now())

    def wait_s(self, model: str, before: int) -> int:
        """Return in how many seconds to come back, where so many wait before."""
        now, ends = self._now(), self._ends.get(model, deque())
        while ends and ends[0] < now - WINDOW_S:
            ends.popleft()
        if not ends:
            return self.longest_s
        took_s = max(now - ends[0], 1.0) if len(ends) == ENDS_MAX else WINDOW_S
        wait_s = (before + 1) * took_s / len(ends) * (1 + JITTER * (2 * self._dice() - 1))
        return min(self.longest_s, max(1, ceil(wait_s)))

    def error_in(self, message: str, code: str, wait_s: float, *, should_retry: bool) -> ApiError:
        """Return the error for a request that would be admitted after `wait_s`, with jitter; inf: the time is unknown."""
        told_s = max(SHORTEST_S, wait_s) * (1 + JITTER * (2 * self._dice() - 1))
        told_s = min(float(self.longest_s), told_s)
        again = should_retry and told_s < self.longest_s
        return ApiError(self._status, message, code=code, retry_after_s=told_s, should_retry=again)

    def closed(self, error: AllClosed) -> ApiError:
        """Return the answer where every server has said when to retry: the least of what they said, in whole seconds."""
        retry_after_s = max(1, ceil(error.wait_s))
        return ApiError(self._status, str(error), code=error.code, retry_after_s=retry_after_s)

    def error(self, model: str, message: str, code: str, before: int) -> ApiError:
        """Return the overload error for a request behind `before` waiting ones."""
        return ApiError(self._status, message, code=code, retry_after_s=self.wait_s(model, before))


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
