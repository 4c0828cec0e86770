"""Closes a worker to new requests after its upstream answers 429, or 503 with `Retry-After`.

open ── 429, or 503 with Retry-After ──▶ closed for that long, at most `max_s` ──▶ open
"""

from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime

import structlog

TOO_MANY, UNAVAILABLE = 429, 503
DEFAULT_S = 1.0  # after a 429 without a duration
MAX_S = 60.0  # the longest duration: a wrong header must not close a worker for hours

log = structlog.get_logger(__name__)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds in `Retry-After`; None if there are none. A date is relative to the server's own `Date`."""
    text = headers.get("Retry-After", "").strip()
    try:
        if text.replace(".", "", 1).isdecimal():
            return float(text)
        at, now = parsedate_to_datetime(text), parsedate_to_datetime(headers.get("Date", ""))
        return max(0.0, (at - now).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return None


class RetryGate:
    """Tracks whether one upstream accepts new requests. Canaries have a separate gate: a busy server may still answer them."""

    def __init__(self, now: Callable[[], float], max_s: float = MAX_S) -> None:
        """`now`: monotonic seconds. `max_s`: the longest time for which the gate closes; 0: it never closes."""
        self._now = now
        self._max_s = max_s
        self._users_until = float("-inf")
        self._canaries_until = float("-inf")

    def closed_s(self, *, canary: bool = False) -> float:
        """Return for how many seconds the gate stays closed; 0: it is open."""
        return max(0.0, (self._canaries_until if canary else self._users_until) - self._now())

    def refused(self, status: int, headers: Mapping[str, str], *, canary: bool) -> bool:
        """Process a refused request. Return whether it closes the gate; if so, the refusal is no failure of the upstream."""
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
