"""What is in the body of a request to a worker?"""

from collections.abc import Mapping
from typing import Any

from events.errors import HoldfastError


class BadRequest(HoldfastError):
    """A request to this worker makes no sense."""


def number(body: Mapping[str, Any], name: str, otherwise: float) -> float:
    """Return a number of a request's body. Raise BadRequest if it is none, or below zero."""
    value = body.get(name)
    if value is None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise BadRequest(f"{name} = {value!r}: a number from 0 up is wanted")
    return float(value)


def share(body: Mapping[str, Any], name: str) -> float:
    """Return a share of a request's body, above 0 and not above 1. Raise BadRequest if it is none."""
    value = number(body, name, 0.0)
    if not 0 < value <= 1:
        raise BadRequest(f"{name} = {body.get(name)!r}: a number above 0 and not above 1 is wanted")
    return value
