"""What is to be done after which answer of a receiver?

    2xx                            delivered: the next event
    410                            the webhook stops: its receiver wants nothing any more
    none, 3xx, 401, 403, 404 …     away (`is_away`): the line is held, until the event is `hold_s` old
    everything else: 400, 500 …    refused: tried `tries_max` times, for it may be this event alone

What a webhook gives up goes to the dead letters, and it goes on with the next event. Why not one bound for all? A receiver that
is away, or does not know us, takes nothing: whoever went on would bury all that happens meanwhile. One that answers with an error
may choke on this event, and would never be told of another.

Waits double, with jitter. A receiver that says when to come again (Retry-After) is not asked before.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime

AWAY = frozenset({401, 403, 404, 405, 407, 408, 425, 429, 502, 503, 504})  # they say nothing of the event
GONE = 410
DOUBLINGS_MAX = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long to insist."""

    tries_max: int = 8  # of one event that is refused
    hold_s: float = 86_400.0  # an event's age from which on nobody waits for a receiver that is away
    wait_min_s: float = 1.0
    wait_max_s: float = 60.0
    retry_after_max_s: float = 3_600.0  # however much longer a receiver wants to be left alone

    def __post_init__(self) -> None:
        if not (self.tries_max > 0 and 0 < self.wait_min_s <= self.wait_max_s and self.hold_s >= 0):
            raise ValueError(
                "tries_max and wait_min_s are more than 0, and wait_max_s is at least wait_min_s"
            )


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one try."""

    status: int | None  # None: no answer
    says: str = ""  # in one line: why there was none, or the beginning of what was answered
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Delivered:
    """It was taken."""


@dataclass(frozen=True, slots=True)
class Again:
    """It is tried again after `wait_s` seconds."""

    wait_s: float


@dataclass(frozen=True, slots=True)
class Undeliverable:
    """It goes to the dead letters."""

    reason: str


@dataclass(frozen=True, slots=True)
class ReceiverGone:
    """Nothing is sent to this webhook any more."""

    reason: str


Step = Delivered | Again | Undeliverable | ReceiverGone


def step(policy: RetryPolicy, answer: Answer, tries: int, age_s: float, chance: float) -> Step:
    """Return what to do after a try, the `tries`th of this event, which is `age_s` old. `chance`: from 0 to 1."""
    status = answer.status
    if status is not None and 200 <= status < 300:
        return Delivered()
    if status == GONE:
        return ReceiverGone("it answered 410 Gone: it wants nothing any more")
    if is_away(status):
        if age_s >= policy.hold_s:
            return Undeliverable(f"{_said(answer)}; the event is older than {policy.hold_s:g} s")
    elif tries >= policy.tries_max:
        return Undeliverable(f"{_said(answer)}, {tries} times")
    return Again(_wait_s(policy, answer, tries, chance))


def is_away(status: int | None) -> bool:
    """Say whether no event would be taken now: nobody answers, or who does knows neither us nor the place. A redirect is such."""
    return status is None or 300 <= status < 400 or status in AWAY


def _wait_s(policy: RetryPolicy, answer: Answer, tries: int, chance: float) -> float:
    doubled: float = policy.wait_min_s * 2.0 ** min(tries - 1, DOUBLINGS_MAX)
    own = min(policy.wait_max_s, doubled) * (0.5 + chance / 2)
    return max(own, min(answer.retry_after_s or 0.0, policy.retry_after_max_s))


def _said(answer: Answer) -> str:
    return answer.says if answer.status is None else f"it answered {answer.status}"


def retry_after_s(headers: Mapping[str, str], now: datetime) -> float | None:
    """Return for how many seconds a receiver wants to be left alone: Retry-After has seconds, or an instant."""
    said = headers.get("Retry-After", "").strip()
    if said.isdigit() and len(said) < 10:
        return float(said)
    try:
        return max(0.0, (parsedate_to_datetime(said) - now).total_seconds())
    except (ValueError, TypeError, OverflowError):  # TypeError: an instant without a zone
        return None
