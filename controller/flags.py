"""Command-line flags from a settings model: `interval_s` becomes `--interval-s`, with its type, default and text.

A role's settings come from three places, the later winning: the model's defaults, `HOLDFAST_<SECTION>__<FIELD>` in
the environment, flags.
"""

import argparse
import os
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from events.errors import HoldfastError

M = TypeVar("M", bound=BaseModel)
PREFIX = "HOLDFAST_"


class BadSetting(HoldfastError):
    """A setting has a value that makes no sense."""


def add_flags(parser: argparse.ArgumentParser, model: type[BaseModel]) -> None:
    """Give `parser` one flag per plain field of `model`. Fields that are models themselves are left to the environment."""
    taken = {option for action in parser._actions for option in action.option_strings}
    for name, field in model.model_fields.items():
        flag = "--" + name.replace("_", "-")
        if flag in taken or (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            continue
        text = (field.description or "").replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(
                flag, dest=name, action=argparse.BooleanOptionalAction, default=None, help=text
            )
        else:
            parser.add_argument(
                flag, dest=name, default=None, metavar="X", help=f"{text} (default: {field.default})"
            )


def gather(
    model: type[M], section: str, args: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> M:
    """Build one section of the settings. Raise BadSetting, naming the setting, its value and what is expected."""
    values = from_environment(model, section, os.environ if environment is None else environment)
    for name, field in model.model_fields.items():
        if args.get(name) is not None:
            values[name] = _split(field.annotation, args[name])
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise BadSetting(describe(error, section)) from error


def from_environment(model: type[BaseModel], section: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields that the environment sets, nested as the model is. Raise BadSetting for a name that is none."""
    start = f"{PREFIX}{section.upper()}__"
    found: dict[str, Any] = {}
    for variable, value in environment.items():
        if not variable.startswith(start):
            continue
        *nest, last = variable[len(start) :].lower().split("__")
        place, fields = found, model
        for part in [*nest, last]:
            if part not in fields.model_fields:
                raise BadSetting(f"{variable} is not a setting; `holdfast settings` lists them")
            annotation = fields.model_fields[part].annotation
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                fields = annotation
            else:
                value = _split(annotation, value)
        for part in nest:
            place = place.setdefault(part, {})
        place[last] = value
    return found


def _split(annotation: Any, value: Any) -> Any:
    """Let a comma-separated text fill a tuple or list field."""
    if isinstance(value, str) and any(
        get_origin(a) in (tuple, list) for a in (annotation, *get_args(annotation))
    ):
        return [part for part in value.split(",") if part]
    return value


def describe(error: ValidationError, section: str) -> str:
    """Say in one sentence which settings are wrong, with their values, and what they should be."""
    return "; ".join(
        f"{section}.{'.'.join(str(part) for part in e['loc'])} = {e['input']!r}: {e['msg'][0].lower()}{e['msg'][1:]}"
        for e in error.errors()
    )
