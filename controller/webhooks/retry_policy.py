"""The retry policy of a webhook: what to do after each response of its receiver.

    2xx                            delivered: the next event is sent
    410                            the webhook stops: its receiver accepts no more events
    none, 3xx, 401, 403, 404 …     away (`is_away`): the event is retried until it is `hold_s` old
    everything else: 400, 500 …    refused: the event is tried `tries_max` times, because only this event may be the cause

An event that is given up goes to the dead letters, and the webhook continues with the next event. There are two limits, for two
causes. A receiver that is away, or does not accept our credentials, accepts no event at all. Giving up early would turn all
events of that time into dead letters. A receiver that answers with an error may fail on this event only. Retrying for long would
keep all later events from it.

The wait between tries doubles, with jitter. If a receiver sends Retry-After, it is not contacted before that time.
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
    """The limits of retries: number of tries, age of the event, and the waits between tries."""

    tries_max: int = 8  # maximum tries of an event that the receiver refuses
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
    """A receiver's response to one try."""

    status: int | None  # None: no answer
    says: str = ""  # the error, or the beginning of the response body, as one line
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Delivered:
    """The receiver accepted the event."""


@dataclass(frozen=True, slots=True)
class RetryLater:
    """The event is to be sent again after `wait_s` seconds."""

    wait_s: float


@dataclass(frozen=True, slots=True)
class Undeliverable:
    """The event is given up and goes to the dead letters."""

    reason: str


@dataclass(frozen=True, slots=True)
class ReceiverGone:
    """The receiver accepts no more events, so the webhook stops."""

    reason: str


Step = Delivered | RetryLater | Undeliverable | ReceiverGone


def step(policy: RetryPolicy, answer: Answer, tries: int, age_s: float, chance: float) -> Step:
    """Return what to do after the `tries`-th try of an event that is `age_s` seconds old.

    `chance` is a random number from 0 to 1, which gives the wait its jitter.
    """
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
    """Return whether this status means that the receiver accepts no event now, whatever the event.

    It is unreachable (None), redirects, is overloaded, or rejects our credentials or the URL.
    """
    return status is None or 300 <= status < 400 or status in AWAY


def _wait_s(policy: RetryPolicy, answer: Answer, tries: int, chance: float) -> float:
    doubled: float = policy.wait_min_s * 2.0 ** min(tries - 1, DOUBLINGS_MAX)
    own = min(policy.wait_max_s, doubled) * (0.5 + chance / 2)
    return max(own, min(answer.retry_after_s or 0.0, policy.retry_after_max_s))


def _summary(answer: Answer) -> str:
    return answer.says if answer.status is None else f"it answered {answer.status}"


def retry_after_s(headers: Mapping[str, str], now: datetime) -> float | None:
    """Return the seconds until the time of a Retry-After header, which holds seconds or an HTTP date; None if it is not valid."""
    value = headers.get("Retry-After", "").strip()
    if value.isdigit() and len(value) < 10:
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - now).total_seconds())
    except (ValueError, TypeError, OverflowError):  # TypeError: a date without a time zone
        return None
