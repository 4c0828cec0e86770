"""The retry policy of a webhook: what to do after each response of its receiver.

    2xx                                   delivered: the next event is sent
    410                                   the webhook stops: its receiver accepts no more events
    no response, 3xx, 401, 403, 404 …     away (`is_away`): the event is retried until it is `hold_s` old
    everything else: 400, 500 …           refused: tried `tries_max` times, because this event alone may cause the refusal

An event that is given up goes to the dead letters, and the webhook continues with the next event. There are two limits, for two
causes. A receiver that is away, or rejects the notifier's credentials, accepts no event at all. If events were given up early,
all events of that time would become dead letters. A receiver that refuses an event possibly accepts the next one. If this event
were retried for long, all later events would be delayed.

The wait between tries doubles, with jitter. If the receiver sends Retry-After, the wait is at least the time in this header. A
time above RETRY_AFTER_MAX_S counts as RETRY_AFTER_MAX_S.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime

from controller.webhooks.settings import NotifierSettings

# status codes that do not concern the event itself
AWAY = frozenset({401, 403, 404, 405, 407, 408, 425, 429, 502, 503, 504})
GONE = 410
DOUBLINGS_MAX = 32
RETRY_AFTER_MAX_S = 3_600.0  # upper limit of Retry-After


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


def step(settings: NotifierSettings, answer: Answer, tries: int, age_s: float, chance: float) -> Step:
    """Return what to do after try number `tries` of an event that is `age_s` seconds old.

    `chance` is a random number from 0 to 1, which gives the wait its jitter.
    """
    status = answer.status
    if status is not None and 200 <= status < 300:
        return Delivered()
    if status == GONE:
        return ReceiverGone("it answered 410 Gone: it accepts no more events")
    if is_away(status):
        if age_s >= settings.hold_s:
            return Undeliverable(f"{_summary(answer)}; the event is older than {settings.hold_s:g} s")
    elif tries >= settings.tries_max:
        return Undeliverable(f"{_summary(answer)}, {tries} times")
    return RetryLater(_wait_s(settings, answer, tries, chance))


def is_away(status: int | None) -> bool:
    """Return whether this status means that the receiver accepts no event at all at present, whatever the event is.

    Such a receiver is unreachable (None), redirects, is overloaded, or rejects the notifier's credentials or the URL.
    """
    return status is None or 300 <= status < 400 or status in AWAY


def _wait_s(settings: NotifierSettings, answer: Answer, tries: int, chance: float) -> float:
    doubled: float = settings.wait_min_s * 2.0 ** min(tries - 1, DOUBLINGS_MAX)
    own = min(settings.wait_max_s, doubled) * (0.5 + chance / 2)
    return max(own, min(answer.retry_after_s or 0.0, RETRY_AFTER_MAX_S))


def _summary(answer: Answer) -> str:
    return answer.says if answer.status is None else f"it answered {answer.status}"


def retry_after_s(headers: Mapping[str, str], now: datetime) -> float | None:
    """Return the seconds to wait according to a Retry-After header, which contains seconds or an HTTP date.

    Return None if the header is missing or not valid.
    """
    value = headers.get("Retry-After", "").strip()
    if value.isdigit() and len(value) < 10:
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - now).total_seconds())
    except (ValueError, TypeError, OverflowError):  # TypeError: a date without a time zone
        return None
