"""Decides from an upstream's answers whether it is dead, and whether it accepts new requests.

| result of a health check | effect |
|---|---|
| a good answer | resets both counters: refusals in a row, and the time without an answer |
| a refusal: an error status, or a failed connection | the upstream is dead after REFUSALS_MAX refusals in a row |
| no answer in time | the upstream is dead if neither an answer nor a token has come for `silent_s` |

A token of any stream since the start of the check counts as a good answer. The reason is that a saturated server answers /health
late or not at all, and must not be restarted for that. Errors in a stream do not count as tokens.

Any 429 closes the worker to new requests, and so does a 503 that has a `Retry-After` header:

open ── such a response ──▶ closed for the header's time (1 s for a 429 without the header), at most `max_s` ──▶ open
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import structlog

ANSWER_S_MAX = 8.0  # for one check over all paths; the worker's own deadline for a check is 10 s
REFUSALS_MAX = 3  # in a row
# default of `silent_s`: longer than a server's compilation or garbage collection, and equal to the setting `dead_after`
SILENT_S = 30.0
TOO_MANY, UNAVAILABLE = 429, 503
DEFAULT_S = 1.0  # time for which a 429 without `Retry-After` closes a worker
MAX_S = 60.0  # longest time for which a refusal closes a worker: a wrong header must not close it for hours

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HealthAnswer:
    """The result of one health check."""

    trouble: str = ""  # the reason why the check failed; empty: the upstream is healthy
    timed_out: bool = False  # the check failed because no answer came in time


class UpstreamHealth:
    """Decides from consecutive health checks whether one upstream is dead. All times are monotonic seconds."""

    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s
        self.refusals = 0  # number of refused checks in a row
        # start of the first unanswered check in a row; None: the last was answered
        self._silent_since: float | None = None

    def judge(self, answer: HealthAnswer, began_at: float, token_at: float, now: float) -> str:
        """Process one health check. Return why the upstream is dead, or an empty string if it is not dead.

        Args:
            answer: the result of the check.
            began_at: when the check began.
            token_at: when a token of any stream last arrived.
            now: when the check ended.
        """
        if self._silent_since is not None and token_at >= self._silent_since:
            self._silent_since = None
        if not answer.trouble or token_at >= began_at:
            self.refusals, self._silent_since = 0, None
            return ""
        if not answer.timed_out:
            self.refusals += 1
            return answer.trouble if self.refusals >= REFUSALS_MAX else ""
        self._silent_since = began_at if self._silent_since is None else self._silent_since
        silent_s = now - max(self._silent_since, token_at)
        if silent_s < self._silent_s:
            return ""
        return f"{answer.trouble}, and no token came for {silent_s:.0f} s"

    @property
    def troubled(self) -> bool:
        """Whether the last health check failed, and no token came during the check."""
        return self.refusals > 0 or self._silent_since is not None


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of the `Retry-After` header; None if the header is missing or invalid.

    If the header holds a date, the result is the time from the response's `Date` header to that date.
    """
    text = headers.get("Retry-After", "").strip()
    try:
        if text.replace(".", "", 1).isdecimal():
            return float(text)
        at, now = parsedate_to_datetime(text), parsedate_to_datetime(headers.get("Date", ""))
        return max(0.0, (at - now).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return None


class RetryGate:
    """Tracks whether one upstream accepts new requests.

    Users' requests and canaries have separate gates. The refusal of a user's request only closes the gate for users' requests,
    because a busy server may still answer canaries. The refusal of a canary closes both gates.
    """

    def __init__(self, now: Callable[[], float], max_s: float = MAX_S) -> None:
        """Use the clock `now` (monotonic seconds). Close for at most `max_s` seconds; 0: never close."""
        self._now = now
        self._max_s = max_s
        self._users_until = float("-inf")
        self._canaries_until = float("-inf")

    def closed_s(self, *, canary: bool = False) -> float:
        """Return for how many seconds the gate stays closed. 0 means that the gate is open."""
        return max(0.0, (self._canaries_until if canary else self._users_until) - self._now())

    def refused(self, status: int, headers: Mapping[str, str], *, canary: bool) -> bool:
        """Process the status and headers of a refused request.

        Return True if the refusal closes the gate. The caller must not count such a refusal as a failure of the upstream.
        """
        seconds = retry_after_s(headers)
        if status == TOO_MANY and seconds is None:
            seconds = DEFAULT_S
        if status not in (TOO_MANY, UNAVAILABLE) or seconds is None:
            return False
        until = self._now() + min(seconds, self._max_s)
        if self.closed_s(canary=canary) == 0.0 and until > self._now():
            log.warning("upstream_closed", status=status, seconds=min(seconds, self._max_s))
        self._users_until = max(self._users_until, until)
        if canary:
            self._canaries_until = max(self._canaries_until, until)
        return True
