"""Validates the values of policies. An invalid value raises ValueError with a one-sentence message.

A policy is a plain dataclass. If pydantic parses a policy from the settings, `STRICT` makes pydantic reject unknown names.
"""

from datetime import timedelta

STRICT = {"extra": "forbid"}  # as `__pydantic_config__`


def demand(holds: bool, sentence: str) -> None:
    """Raise ValueError with `sentence` unless `holds`."""
    if not holds:
        raise ValueError(sentence)


def at_least(least: float, **values: float | timedelta | None) -> None:
    """Raise ValueError for the first of `values` that is below `least` or not a number.

    A duration is compared in seconds, and None is accepted.
    """
    for name, value in values.items():
        number = value.total_seconds() if isinstance(value, timedelta) else value
        demand(number is None or number >= least, f"{name} is {number}: it must be at least {least:g}")


def share(**values: float) -> None:
    """Raise ValueError for the first of `values` that is not between 0 and 1."""
    for name, value in values.items():
        demand(0 <= value <= 1, f"{name} is {value}: it must be between 0 and 1")
