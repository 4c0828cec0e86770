"""What settings are made of: models that refuse names they do not know, and the kinds of number in them."""

import re
from datetime import timedelta
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_SIZE = re.compile(r"([0-9]{1,15})\s*(?:([KMGT])i?)?B?", re.IGNORECASE)
_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhd]?)", re.IGNORECASE)
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _size(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if not (found := _SIZE.fullmatch(value.strip())):
        raise ValueError("a size is a number of bytes, or one with KiB, MiB, GiB or TiB")
    return int(found[1]) << 10 * " KMGT".index((found[2] or " ").upper())


def _age(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if not (found := _AGE.fullmatch(value.strip())):
        raise ValueError("an age is a number of seconds, or one with m, h or d behind it")
    return timedelta(seconds=float(found[1]) * _SECONDS[found[2].lower()])


Positive = Annotated[float, Field(gt=0)]
# Products of a few of these are still numbers.
NotNegative = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Size = Annotated[int, BeforeValidator(_size)]
"""Bytes: a number, or such a text as "10GiB"."""
Age = Annotated[timedelta, BeforeValidator(_age)]
"""A duration: seconds, or such a text as "30d"."""
Share = Annotated[float, Field(ge=0, le=1)]


class Strict(BaseModel):
    """A settings model that refuses names it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)
