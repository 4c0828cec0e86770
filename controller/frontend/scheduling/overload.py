"""What is a client told who finds no room, and when should he come back?

By how many requests have ended lately, and how many wait before his. Clients that were refused together should not come back
together: each is told a little less or more.
"""

from collections import deque
from collections.abc import Callable
from math import ceil

from controller.frontend.errors import ApiError
from controller.router.selection.filter import AllClosed

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
        """Return what a client is told who would be let in after `wait_s`, a little less or more; inf: nobody knows when."""
        told_s = max(SHORTEST_S, wait_s) * (1 + JITTER * (2 * self._dice() - 1))
        told_s = min(float(self.longest_s), told_s)
        again = should_retry and told_s < self.longest_s
        return ApiError(self._status, message, code=code, retry_after_s=told_s, should_retry=again)

    def closed(self, error: AllClosed) -> ApiError:
        """Return the answer where every server has said when to retry: the least of what they said, in whole seconds."""
        retry_after_s = max(1, ceil(error.wait_s))
        return ApiError(self._status, str(error), code=error.code, retry_after_s=retry_after_s)

    def error(self, model: str, message: str, code: str, before: int) -> ApiError:
        """Return what a client is told, where so many wait before him."""
        return ApiError(self._status, message, code=code, retry_after_s=self.wait_s(model, before))
