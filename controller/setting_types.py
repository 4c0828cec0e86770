"""Defines the base model of settings, and the types of settings with a unit or range."""

import re
from datetime import timedelta
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_SIZE = re.compile(r"([0-9]{1,15})\s*(?:([KMGT])i?)?B?", re.IGNORECASE)
_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhd]?)", re.IGNORECASE)
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _size(value: object) -> object:
    if not isinstance(value, str):
        return value
    if not (found := _SIZE.fullmatch(value.strip())):
        raise ValueError("a size must be a number of bytes, or a number with KiB, MiB, GiB or TiB")
    return int(found[1]) << 10 * " KMGT".index((found[2] or " ").upper())


def _age(value: object) -> object:
    if not isinstance(value, str):
        return value
    if not (found := _AGE.fullmatch(value.strip())):
        raise ValueError("an age must be a number of seconds, or a number followed by m, h or d")
    return timedelta(seconds=float(found[1]) * _SECONDS[found[2].lower()])


Positive = Annotated[float, Field(gt=0)]
# The upper bound keeps the product of a few such numbers finite.
NotNegative = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Size = Annotated[int, BeforeValidator(_size, json_schema_input_type=int | str)]
"""Bytes: a number, or text such as "10GiB"."""
Age = Annotated[timedelta, BeforeValidator(_age, json_schema_input_type=float | str)]
"""A duration: seconds, or text such as "30d"."""
Share = Annotated[float, Field(ge=0, le=1)]
T = TypeVar("T")


def setting(default: T, description: str, *, flag: str = "", **more: Any) -> T:
    """Return the pydantic field of a setting with this default and description.

    `flag` names the setting's command-line flag; "" stores none. `more` are further arguments of `Field`."""
    if flag:
        more["json_schema_extra"] = {"flag": flag}
    field: T = Field(default, description=description, **more)
    return field


class Strict(BaseModel):
    """Base class of settings models. A model is immutable and rejects settings that it does not define."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
