"""Parses a moment of the journal: a sequence number, a date and time, a time of day, or how long ago."""

import re
from datetime import UTC, datetime, timedelta

from events.errors import HoldfastError

FORMATS = (
    "a sequence, an instant (2026-03-01T12:00:03Z), a time of day in UTC (12:00:03), or how long ago (10m)"
)
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_AGO = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


class BadMoment(HoldfastError):
    """A place in the journal is a sequence (8812), an instant (2026-03-01T12:00:03Z), a time of day in UTC (12:00:03),
    or how long ago (90s, 10m, 2h, 1d)."""


def duration_s(text: str) -> float | None:
    """Return the seconds of a duration such as `10m`; None if the text is not a duration."""
    found = _AGO.fullmatch(text)
    return float(found[1]) * _UNITS[found[2]] if found else None


def parse(text: str, now: datetime) -> int | datetime:
    """Parse `text` as a sequence number or a time. Raise BadMoment if the text is neither.

    A duration such as `10m` means that long before `now`. A date and time without a time zone is in UTC."""
    if text.isdecimal():
        return int(text)
    try:
        if (ago_s := duration_s(text)) is not None:
            return now - timedelta(seconds=ago_s)
        if re.fullmatch(r"\d\d:\d\d(:\d\d(\.\d+)?)?", text):
            return _time_of_day(text, now)
        found = datetime.fromisoformat(text)
    except (ValueError, OverflowError) as error:
        raise BadMoment(f"{text!r} is not a place in the journal. {BadMoment.__doc__}") from error
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _time_of_day(text: str, now: datetime) -> datetime:
    """Return the latest time, not after `now`, that has this time of day in UTC. The result is today or yesterday."""
    found = datetime.fromisoformat(f"{now.astimezone(UTC).date().isoformat()}T{text}").replace(tzinfo=UTC)
    return found if found <= now else found - timedelta(days=1)
