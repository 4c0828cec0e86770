"""Reads settings from defaults, environment variables (`HOLDFAST_<SECTION>__<FIELD>`) and flags.

A flag overrides the variable of the same setting, and a variable overrides the default. A section is a pydantic model. A section
may contain policies, which are dataclasses, and a variable names a policy's field by its path:
`HOLDFAST_CONTROLLER__POLICY__BREAKER__WAIT_MIN=30`.

Each field of a section that is neither a model nor a dataclass gets a flag. For example, `interval_s` gets `--interval-s`. If a
field is a model itself, its metadata decide which of its own fields get a flag. With `flags` (a prefix), all of them do. With
`nested`, the listed fields do, at any depth.

The designs that Holdfast derives from (the seeds: docs/concepts/seed-map.md) have other names for some settings. These names are
accepted wherever settings are read. If Holdfast fixes a setting of a seed, only the fixed value is accepted.
"""

import argparse
import dataclasses
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from controller.config.variables import PREFIX
from events.errors import BadSetting

ALIASES: Mapping[str, str] = {
    "controller.canary.check_interval": "interval_s",
    "controller.canary.check_interval_sec": "interval_s",
    "controller.policy.breaker.failure_threshold": "failures_max",
    "controller.policy.breaker.recovery_timeout_sec": "wait_min",
    "controller.policy.degradation.slos.*.slo_throughput": "slo_throughput_rps",
    "frontend.breaker.failure_threshold": "failures_max",
    "frontend.breaker.recovery_timeout_sec": "wait_s",
    "frontend.retry_after_sec": "retry_after_s",
}
"""The place of a setting with the last part as a seed names it, and that part's name here. `*`: any model."""

FIXED: Mapping[str, tuple[int, str]] = {
    "controller.policy.breaker.half_open_max_calls": (1, "one trial at a time, with a deadline"),
    "controller.policy.breaker.success_threshold": (
        1,
        "one trial that passes closes it; the ramp does the rest",
    ),
    "frontend.breaker.half_open_max_calls": (1, "one trial at a time, with a deadline"),
    "frontend.breaker.success_threshold": (1, "one trial that passes closes it"),
}
"""Settings of the seeds that are fixed here: the only accepted value, and the reason."""


DYNAMO: Mapping[str, str] = {
    "DYN_ADMISSION_CONTROL": "frontend.admission_control",
    "DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD": "frontend.active_decode_blocks_threshold",
    "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD": "frontend.active_prefill_tokens_threshold",
    "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC": "frontend.active_prefill_tokens_threshold_frac",
    "DYN_HTTP_OVERLOAD_STATUS_CODE": "frontend.overload_status_code",
}
"""NVIDIA Dynamo's variables for the same settings. Holdfast's own variables take precedence."""


def from_dynamo(section: str, environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the values that Dynamo's variables set in a section, by field name."""
    places = {variable: place.partition(".") for variable, place in DYNAMO.items()}
    return {
        name: environment[variable]
        for variable, (owner, _, name) in places.items()
        if owner == section and environment.get(variable)
    }


def canonical(section: str, path: Sequence[str]) -> list[str]:
    """Return the path of a setting within a section, with a seed's name for the setting replaced by Holdfast's name."""
    return [*path[:-1], _own((section, *path))]


def fixed(section: str, path: Sequence[str], value: object) -> bool:
    """Return whether a seed's setting is fixed by Holdfast. Raise BadSetting if `value` is not the fixed value."""
    place = ".".join((section, *path))
    if place not in FIXED:
        return False
    only, why = FIXED[place]
    if str(value) != str(only):
        raise BadSetting(f"{place} = {value!r}: the value is fixed at {only} ({why})")
    return True


def renamed(section: str, values: Mapping[str, object], path: tuple[str, ...] = ()) -> dict[str, object]:
    """Return a section's values with seeds' names replaced by Holdfast's names, at every depth.

    `values` are the values below `path`. Fixed settings are dropped. Raise BadSetting if a setting is given under both names.
    """
    found: dict[str, object] = {}
    for name, value in values.items():
        here = (*path, name)
        if fixed(section, here, value):
            continue
        own = _own((section, *here))
        if own in found or (own != name and own in values):
            place = ".".join((section, *path, own))
            raise BadSetting(f"{place} is given twice, once as {name}: remove one of the two")
        found[own] = renamed(section, value, here) if isinstance(value, dict) else value
    return found


def _own(place: Sequence[str]) -> str:
    """Return Holdfast's name of a setting. The last part of `place`, its path, is Holdfast's name or a seed's name.

    The path is not split at dots, because a part of it may be a model's name that contains dots.
    """
    exact = ALIASES.get(".".join(place))
    return exact or ALIASES.get(".".join((*place[:-2], "*", place[-1]))) or place[-1]


M = TypeVar("M", bound=BaseModel)


def fields_of(model: type) -> dict[str, Any]:
    """Return the types of the fields of a settings model or policy, by field name."""
    if issubclass(model, BaseModel):
        return {name: field.annotation for name, field in model.model_fields.items()}
    hints = get_type_hints(model)
    assert dataclasses.is_dataclass(model)
    return {field.name: hints[field.name] for field in dataclasses.fields(model)}


def is_section(annotation: object) -> bool:
    """Return whether a field of this type contains settings of its own, because it is a model or a dataclass."""
    if not isinstance(annotation, type) or get_origin(annotation) is not None:
        return False
    return issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation)


def flagged(model: type[BaseModel]) -> Iterator[tuple[str, list[str], FieldInfo]]:
    """Yield every field that has a flag, as its path (`field` or `section.field`), the flag's names and the field."""
    for name, field in model.model_fields.items():
        if not is_section(field.annotation):
            yield name, [_flag("--", name), *_extra(field, "also", ())], field
        elif issubclass(field.annotation, BaseModel):  # type: ignore[arg-type]
            section: type[BaseModel] = field.annotation  # type: ignore[assignment]
            for below, one in section.model_fields.items():
                own = _extra(one, "flag", "")  # for a section in which only some settings have flags
                if start := _extra(field, "flags", ""):
                    yield f"{name}.{below}", [_flag(start, below), *_extra(one, "also", ())], one
                elif own:
                    yield f"{name}.{below}", [own], one
        for place, (flag, text) in _extra(field, "nested", {}).items():
            yield f"{name}.{place}", [flag], _below(field, place, text)


def _below(section: FieldInfo, place: str, text: str) -> FieldInfo:
    """Return the field at the dotted path `place` below a section, with `text` as its description."""
    annotation, default = section.annotation, section.default
    for name in place.split("."):
        assert isinstance(annotation, type)
        annotation, default = fields_of(annotation)[name], getattr(default, name)
    shown = default.total_seconds() if isinstance(default, timedelta) else default
    return FieldInfo(annotation=annotation, default=f"{shown:g}", description=text)


def _flag(start: str, name: str) -> str:
    return start + name.replace("_", "-")


def _extra(field: FieldInfo, name: str, default: Any) -> Any:
    extra = field.json_schema_extra
    return extra.get(name, default) if isinstance(extra, dict) else default


def _as_given(default: object) -> str:
    """Return a default value as a user would write it on the command line."""
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def add_flags(
    parser: argparse.ArgumentParser, model: type[BaseModel], *, only: Collection[str] | None = None
) -> None:
    """Add the flags of a section's fields to `parser`, except those that `parser` already has.

    If `only` is given, add only the flags of the fields with these paths.
    """
    # argparse exposes a parser's flags only in this private attribute
    taken = {option for action in parser._actions for option in action.option_strings}
    for place, names, field in flagged(model):
        if names[0] in taken or (only is not None and place not in only):
            continue
        text = (field.description or "").replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(
                *names, dest=place, action=argparse.BooleanOptionalAction, default=None, help=text
            )
        else:
            default = (
                f" (default: {_as_given(field.default)})" if field.default not in (None, "", (), {}) else ""
            )
            text = f"{text}{default}".strip()
            parser.add_argument(*names, dest=place, default=None, metavar="X", help=text.replace("%", "%%"))


def gather(
    model: type[M], section: str, args: Mapping[str, object], environment: Mapping[str, str] | None = None
) -> M:
    """Build one section of the settings from the environment and the flags in `args`.

    Raise BadSetting with the setting, its value and what is expected.
    """
    values = from_environment(model, section, os.environ if environment is None else environment)
    for place, _, field in flagged(model):
        if args.get(place) is not None:
            *inner, name = place.split(".")
            where: object = values
            for part in inner:
                where = where.setdefault(part, {}) if isinstance(where, dict) else None
            # if the environment sets the whole section to a value, validation rejects that value
            if isinstance(where, dict):
                where[name] = _value(field.annotation, args[place])
    values = renamed(section, values)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise BadSetting(describe(error, section, model)) from error


def as_variables(section: str, model: type[BaseModel], args: Mapping[str, object]) -> dict[str, str]:
    """Convert the flags in `args` to environment variables with the same effect, for a process with this section."""
    start = f"{PREFIX}{section.upper()}__"
    return {
        start + place.replace(".", "__").upper(): str(args[place])
        for place, _, _ in flagged(model)
        if args.get(place) is not None
    }


def from_environment(model: type, section: str, environment: Mapping[str, str]) -> dict[str, object]:
    """Return the values that the environment sets in a section, nested like the model.

    Raise BadSetting for a variable of the section that is not a setting.
    """
    start = f"{PREFIX}{section.upper()}__"
    found: dict[str, object] = {}
    for variable, text in environment.items():
        if variable.startswith(start):
            path = variable[len(start) :].lower().split("__")
            if not fixed(section, path, text):
                _place(found, model, variable, canonical(section, path), text)
    return {**from_dynamo(section, environment), **found}


def _place(found: dict[str, Any], model: type, variable: str, path: list[str], text: str) -> None:
    """Set the value of one variable in `found` at `path`. Raise BadSetting if the model has no such setting."""
    for depth, part in enumerate(path):
        fields = fields_of(model)
        if part not in fields:
            raise BadSetting(f"{variable} is not a setting; `holdfast settings` lists them all")
        last = depth == len(path) - 1
        if is_section(fields[part]) and not last:
            found, model = found.setdefault(part, {}), fields[part]
        elif last and part in found:
            raise BadSetting(f"{variable} repeats another variable: {part} is given twice")
        elif last:
            found[part] = _value(fields[part], text)
        else:
            raise BadSetting(f"{variable} is not a setting: {part} has no settings of its own")


def _value(annotation: object, text: object) -> object:
    """Parse a text for a field of this type.

    For a duration, the text is a number of seconds. For a collection, the text is JSON, or values separated by commas. Return any
    other text unchanged, and leave the detection of errors to pydantic's validation.
    """
    if not isinstance(text, str):
        return text
    kinds = {get_origin(a) or a for a in (annotation, *get_args(annotation))}
    if timedelta in kinds:
        try:
            return timedelta(seconds=float(text))
        except (ValueError, OverflowError):
            return text
    if text[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except ValueError:
            return text
    if kinds & {tuple, list, frozenset}:
        return [part for part in text.split(",") if part]
    return text


def describe(
    error: ValidationError,
    section: str,
    model: type[BaseModel] | None = None,
    only: Callable[[Mapping[str, object]], bool] = lambda one: True,
) -> str:
    """Return one sentence with the invalid settings, their values and what is expected.

    With `model`, the sentence also names the settings' flags. `only` selects the errors to describe.
    """
    flags = {} if model is None else {place: names[0] for place, names, _ in flagged(model)}
    return "; ".join(_sentence(dict(e), section, flags) for e in error.errors() if only(dict(e)))


def _sentence(error: Mapping[str, Any], section: str, flags: Mapping[str, str]) -> str:
    """Return the part of the sentence about one error. The value is left out if it is a whole section."""
    place = ".".join(str(part) for part in error["loc"])
    name = f"{section}.{place}" if place else section
    message = error["msg"].removeprefix("Value error, ")
    if not isinstance(error["input"], Mapping):
        name = f"{name} = {error['input']!r}"
    flag = f" ({flags[place]})" if place in flags else ""
    return f"{name}: {message[0].lower()}{message[1:]}{flag}"


def flatten(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield the dotted name and the value of every setting in `value`, a section or policy at `path`."""
    for name in fields_of(type(value)):
        below = getattr(value, name)
        if is_section(type(below)):
            yield from flatten(below, f"{path}.{name}")
        else:
            yield f"{path}.{name}", below
