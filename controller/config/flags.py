"""Reads settings from defaults, environment variables (`HOLDFAST_<SECTION>__<FIELD>`) and flags.

A flag overrides the variable of the same setting, and a variable overrides the default. A section is a pydantic model. It can
contain policies, which are dataclasses. A variable names a policy's field by its path:
`HOLDFAST_CONTROLLER__POLICY__BREAKER__WAIT_MIN=30`.

A field of a section gets a flag: `interval_s` gets `--interval-s`. The exception is a field that is itself a model or policy (an
outer field). Its inner fields get flags by these entries of `json_schema_extra`:

    flags    in an outer field that is a model: the prefix of the flags of all its inner fields
    nested   in an outer field: the flag of each listed inner field, by its path (any depth)
    flag     in an inner field of a model: the flag of this field alone

The original design documents of Holdfast (the seeds: docs/concepts/seed-map.md) name some settings differently. Those names are
accepted wherever settings are read. Some settings of the designs have one fixed value in Holdfast: any other value is rejected.
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
"""By path of a setting that ends in a name from the original designs: Holdfast's name for that last part. `*` is any model."""

FIXED: Mapping[str, tuple[int, str]] = {
    "controller.policy.breaker.half_open_max_calls": (1, "one trial at a time, with a deadline"),
    "controller.policy.breaker.success_threshold": (
        1,
        "one trial that passes closes it; the ramp does the rest",
    ),
    "frontend.breaker.half_open_max_calls": (1, "one trial at a time, with a deadline"),
    "frontend.breaker.success_threshold": (1, "one trial that passes closes it"),
}
"""Settings from the original designs that Holdfast fixes: the only accepted value, and the reason."""


DYNAMO: Mapping[str, str] = {
    "DYN_ADMISSION_CONTROL": "frontend.admission_control",
    "DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD": "frontend.active_decode_blocks_threshold",
    "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD": "frontend.active_prefill_tokens_threshold",
    "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC": "frontend.active_prefill_tokens_threshold_frac",
    "DYN_HTTP_OVERLOAD_STATUS_CODE": "frontend.overload_status_code",
}
"""By environment variable of NVIDIA Dynamo: the equivalent setting. Holdfast's own variables take precedence."""


def from_dynamo(section: str, environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the values that NVIDIA Dynamo's environment variables set in a section, by field name."""
    places = {variable: place.partition(".") for variable, place in DYNAMO.items()}
    return {
        name: environment[variable]
        for variable, (owner, _, name) in places.items()
        if owner == section and environment.get(variable)
    }


def canonical(section: str, path: Sequence[str]) -> list[str]:
    """Return a setting's path within its section, with a name from the original designs replaced by Holdfast's name."""
    return [*path[:-1], _own((section, *path))]


def fixed(section: str, path: Sequence[str], value: object) -> bool:
    """Return whether Holdfast fixes the setting to one value (`FIXED`).

    Raise BadSetting if `value` differs from the fixed value.
    """
    place = ".".join((section, *path))
    if place not in FIXED:
        return False
    only, why = FIXED[place]
    if str(value) != str(only):
        raise BadSetting(f"{place} = {value!r}: the value is fixed at {only} ({why})")
    return True


def renamed(section: str, values: Mapping[str, object], path: tuple[str, ...] = ()) -> dict[str, object]:
    """Return a section's values with names from the original designs (`ALIASES`) replaced by Holdfast's names.

    Nested values are renamed as well, and settings in `FIXED` are dropped. `path` is the path from the section to `values`. Raise
    BadSetting if a setting is given under both names, or if a setting in `FIXED` has another value than the fixed one.
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
    """Return Holdfast's name for the last part of the path `place`, which may be a name from the original designs.

    `place` is a sequence and not a dotted name, because one of its parts can be a model's name, which can contain dots.
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
    """Return whether a field of this type contains further settings: whether the type is a pydantic model or a dataclass."""
    if not isinstance(annotation, type) or get_origin(annotation) is not None:
        return False
    return issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation)


def flagged(model: type[BaseModel]) -> Iterator[tuple[str, list[str], FieldInfo]]:
    """Yield, for every field with a flag: its dotted path below `model`, the flag's names, and the field."""
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

    Raise BadSetting if a value is invalid. The message names the setting, its value and what is expected.
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
    """Convert the flags in `args` to environment variables with the same effect, for a process that reads this section."""
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
    """Set the value of one environment variable in `found` at `path`.

    Raise BadSetting if the model has no such setting, or if another variable has set the same setting."""
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
    """Parse `text` for a field of the type `annotation`.

    A duration is given as a number of seconds, and a collection as JSON or comma-separated values. Text for any other type, and
    text that cannot be parsed, is returned unchanged. Pydantic's validation later reports what is invalid.
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
    """Describe one validation error. The rejected value is left out if it is a whole section."""
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
