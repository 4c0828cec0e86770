"""Validation of policies: an invalid setting is rejected where it is made, with a one-sentence error.

A policy is a plain dataclass. Where pydantic reads one from the settings, `STRICT` makes it reject unknown names.
"""

from datetime import timedelta

STRICT = {"extra": "forbid"}  # as `__pydantic_config__`


def demand(holds: bool, sentence: str) -> None:
    """Raise ValueError with `sentence` unless `holds`."""
    if not holds:
        raise ValueError(sentence)


def at_least(least: float, **values: float | timedelta | None) -> None:
    """Raise ValueError for the first of `values` that is below `least` (seconds, for durations) or not a number."""
    for name, value in values.items():
        number = value.total_seconds() if isinstance(value, timedelta) else value
        demand(number is None or number >= least, f"{name} is {number}: it must be at least {least:g}")


def share(**values: float) -> None:
    """Raise ValueError for the first of `values` that is not between 0 and 1."""
    for name, value in values.items():
        demand(0 <= value <= 1, f"{name} is {value}: it must be between 0 and 1")
