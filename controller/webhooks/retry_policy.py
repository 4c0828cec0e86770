"""The retry policy of a webhook: what to do after each response of its receiver.

    2xx                            delivered: the next event
    410                            the webhook stops: its receiver accepts no more events
    none, 3xx, 401, 403, 404 …     away (`is_away`): the event is retried until it is `hold_s` old
    everything else: 400, 500 …    refused: tried `tries_max` times, because the cause may be this event alone

An event that is given up goes to the dead letters, and the webhook continues with the next one. There are two limits for two
causes. A receiver that is away, or does not accept our credentials, accepts no event: continuing would turn all events of that
time into dead letters. A receiver that answers with an error may fail on this event only: without continuing it would never get
another.

Waits double, with jitter. A receiver that sends Retry-After is not contacted before then.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime

# status codes that do not concern the event itself
AWAY = frozenset({401, 403, 404, 405, 407, 408, 425, 429, 502, 503, 504})
GONE = 410
DOUBLINGS_MAX = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Limits of retries."""

    tries_max: int = 8  # tries of one refused event
    hold_s: float = 86_400.0  # age at which an event is given up while its receiver is away
    wait_min_s: float = 1.0
    wait_max_s: float = 60.0
    retry_after_max_s: float = 3_600.0  # upper limit of Retry-After

    def __post_init__(self) -> None:
        if not (self.tries_max > 0 and 0 < self.wait_min_s <= self.wait_max_s and self.hold_s >= 0):
            raise ValueError(
                "tries_max and wait_min_s must be above 0, wait_max_s at least wait_min_s, and hold_s at least 0"
            )


@dataclass(frozen=True, slots=True)
class Answer:
    """The response to one try."""

    status: int | None  # None: no answer
    says: str = ""  # one line: the error, or the beginning of the response body
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Delivered:
    """The event was accepted."""


@dataclass(frozen=True, slots=True)
class RetryLater:
    """The event is tried again after `wait_s` seconds."""

    wait_s: float


@dataclass(frozen=True, slots=True)
class Undeliverable:
    """The event goes to the dead letters."""

    reason: str


@dataclass(frozen=True, slots=True)
class ReceiverGone:
    """Nothing more is sent to this webhook."""

    reason: str


Step = Delivered | RetryLater | Undeliverable | ReceiverGone


def step(policy: RetryPolicy, answer: Answer, tries: int, age_s: float, chance: float) -> Step:
    """Return what to do after try number `tries` of an event that is `age_s` old. `chance`: random, from 0 to 1."""
    status = answer.status
    if status is not None and 200 <= status < 300:
        return Delivered()
    if status == GONE:
        return ReceiverGone("it answered 410 Gone: it accepts no more events")
    if is_away(status):
        if age_s >= policy.hold_s:
            return Undeliverable(f"{_summary(answer)}; the event is older than {policy.hold_s:g} s")
    elif tries >= policy.tries_max:
        return Undeliverable(f"{_summary(answer)}, {tries} times")
    return RetryLater(_wait_s(policy, answer, tries, chance))


def is_away(status: int | None) -> bool:
    """Return whether the receiver would accept no event now: unreachable, redirected, or it rejects us or the URL."""
    return status is None or 300 <= status < 400 or status in AWAY


def _wait_s(policy: RetryPolicy, answer: Answer, tries: int, chance: float) -> float:
    doubled: float = policy.wait_min_s * 2.0 ** min(tries - 1, DOUBLINGS_MAX)
    own = min(policy.wait_max_s, doubled) * (0.5 + chance / 2)
    return max(own, min(answer.retry_after_s or 0.0, policy.retry_after_max_s))


def _summary(answer: Answer) -> str:
    return answer.says if answer.status is None else f"it answered {answer.status}"


def retry_after_s(headers: Mapping[str, str], now: datetime) -> float | None:
    """Return the seconds of a Retry-After header, which has seconds or an HTTP date; None without a valid one."""
    value = headers.get("Retry-After", "").strip()
    if value.isdigit() and len(value) < 10:
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - now).total_seconds())
    except (ValueError, TypeError, OverflowError):  # TypeError: a date without a time zone
        return None
