"""Applies the file of `--config FILE`: settings by their dotted names, and flags of `up`.

    defaults < file < environment (HOLDFAST_*) < flags

Each source overrides those to its left. Settings of the file are set as environment variables, so that child processes inherit
them. A variable that the environment sets already is not changed. Each entry of `[up]` becomes a flag of `holdfast up`, unless
the user gives the same flag.
"""

import argparse
import json
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from controller.config.flags import ALIASES, DYNAMO, renamed
from controller.config.variables import PLACES, PREFIX, SECTIONS
from events.errors import BadSetting, UsageError
from workers.config.settings import WorkerSettings, annotations
from workers.config.settings_check import DYNAMO as WORKER_DYNAMO
from workers.config.settings_check import convert_settings

WORKER, UP = "worker", "up"
TOP = {place.removeprefix(PREFIX).lower(): place for place in PLACES}
TABLES = (*SECTIONS, WORKER)
SHARED = ("nats_url", "data", "fleet_key_file")  # top-level settings that [worker] can override
# settings that differ between workers, so that `up` sets them for each worker
OF_ONE_WORKER = (*SHARED, "name", "port")
SECRET = ("nats_url", "database_url", "worker.nats_url", "worker.upstream_key")

Toml = Mapping[str, Any]  # a table of the file
Variables = Iterator[tuple[str, str]]


class BadConfigFile(UsageError):
    """The configuration file cannot be used."""


def apply(path: Path, environment: MutableMapping[str, str], tables: Collection[str] = TABLES) -> Toml:
    """Set environment variables for the settings in a file, and return the file's table `up`.

    The top-level keys and the tables named in `tables` are applied. A variable that `environment` sets already is not changed.
    Without `tables`, the file is for a whole fleet. Raise BadConfigFile if the file is invalid, or if a fleet's file changes a
    setting in [worker] that differs between workers (`OF_ONE_WORKER`)."""
    document = _read(path)
    for key in document:
        _check_known(path, key, "", (*TOP, *TABLES, UP))
    found = {TOP[key]: _text(path, key, value) for key, value in document.items() if key in TOP}
    for name in (one for one in tables if one in document):
        values = _table(path, name, document[name])
        if name == WORKER and tables is TABLES and (wrong := _of_one_worker(values)):
            raise BadConfigFile(
                f"{path}: worker.{wrong[0]}: `up` sets it for each worker; use it in a file of `holdfast worker`"
            )
        own = dict(_worker(path, values) if name == WORKER else _role(path, name, values))
        _check(path, name, own)
        found |= own
    for variable, text in found.items():
        if not _is_set(variable, environment):
            environment[variable] = text
    return _table(path, UP, document.get(UP, {}))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise BadConfigFile(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # neither UTF-8 nor TOML
        raise BadConfigFile(f"{path} is not TOML: {error}") from error


def _check_known(path: Path, key: str, above: str, known: Collection[str]) -> None:
    if key not in known:
        near = get_close_matches(key, known, 1)
        hint = f"did you mean {above}{near[0]}?" if near else "`holdfast settings` lists them all"
        raise BadConfigFile(f"{path}: {above}{key} is not a setting; {hint}")


def _table(path: Path, name: str, value: Any) -> Toml:
    if not isinstance(value, dict):
        raise BadConfigFile(f"{path}: {name} = {value!r}: must be a table, [{name}]")
    return value


def _role(path: Path, name: str, table: Toml) -> Variables:
    # here, because without pydantic a worker needs less memory
    from controller.config.sections import section

    return _section(path, (name,), section(name), table)


def _section(path: Path, place: tuple[str, ...], model: type, table: Toml) -> Variables:
    """Yield the environment variable and text of each setting in a table. The valid settings are the fields of `model`."""
    from controller.config.flags import fields_of, is_section

    fields, above = fields_of(model), ".".join(place)
    for key, value in table.items():
        _check_known(path, key, f"{above}.", fields)
        here, name = (*place, key), f"{above}.{key}"
        if is_section(fields[key]):
            yield from _section(path, here, fields[key], _table(path, name, value))
        else:
            yield PREFIX + "__".join(here).upper(), _text(path, name, value)


def _of_one_worker(values: Toml) -> list[str]:
    defaults = WorkerSettings()
    return [key for key in OF_ONE_WORKER if key in values and str(values[key]) != str(getattr(defaults, key))]


def _worker(path: Path, table: Toml) -> Variables:
    for key, value in table.items():
        _check_known(path, key, f"{WORKER}.", annotations())
        yield f"{PREFIX}WORKER_{key.upper()}", _text(path, f"{WORKER}.{key}", value, plain=True)


def _text(path: Path, name: str, value: Any, *, plain: bool = False) -> str:
    """Convert a value of the file to the text of an environment variable. Raise BadConfigFile if its type is invalid.

    A list becomes comma-separated text if `plain` is set, otherwise JSON."""
    if name in TOP:
        value = ",".join(map(str, value)) if name == "admin_hosts" and isinstance(value, list) else value
        if not isinstance(value, str):
            raise BadConfigFile(f"{path}: {_shown(name, value)}: must be text")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    if value == []:
        return ""
    if isinstance(value, list) and plain:
        return ",".join(map(str, value))
    if isinstance(value, list | dict) and not plain:
        with suppress(TypeError):  # a TOML date in the value, which is reported below
            return json.dumps(value)
    raise BadConfigFile(
        f"{path}: {_shown(name, value)}: must be text, a number, true, false, or a list of these"
    )


def _shown(name: str, value: Any) -> str:
    if name in SECRET and isinstance(value, str | list | dict):
        return f"{name} (a {'table' if isinstance(value, dict) else type(value).__name__})"
    return f"{name} = {value!r}" if isinstance(value, str) else f"{name} = {value}"


def _check(path: Path, name: str, variables: Mapping[str, str]) -> None:
    """Raise BadConfigFile if a setting has an invalid value.

    Each setting is checked alone. Constraints between settings are checked by the process that reads the settings, because
    the environment or flags can override settings of the file."""
    try:
        if name == WORKER:
            start = f"{PREFIX}WORKER_"
            convert_settings({key.removeprefix(start).lower(): text for key, text in variables.items()}, {})
        else:
            _check_role(name, variables)
    except BadSetting as error:
        at = f"{WORKER}." if name == WORKER else ""
        raise BadConfigFile(f"{path}: {at}{error}") from None


def _check_role(role: str, variables: Mapping[str, str]) -> None:
    from pydantic import ValidationError

    from controller.config.flags import describe, from_environment
    from controller.config.sections import section

    model = section(role)
    try:
        model.model_validate(renamed(role, from_environment(model, role, variables)))
    except ValidationError as error:
        if text := describe(error, role, only=_is_of_one_setting):
            raise BadSetting(text) from None


def _is_of_one_setting(error: Toml) -> bool:
    """Return whether a validation error is about one setting's value, or about one item of a list-valued setting."""
    return not isinstance(error["input"], Mapping) or any(isinstance(part, int) for part in error["loc"])


def _is_set(variable: str, environment: Mapping[str, str]) -> bool:
    """Return whether the environment already sets the setting that `variable` stands for.

    The setting can be set by the variable itself, by the variable of its whole section, or by an alias."""
    place = variable.removeprefix(PREFIX).lower().replace("__", ".")
    others = [*(f"{PREFIX}{one.replace('.', '__').upper()}" for one in _aliases(place))]
    others += [name for name, own in DYNAMO.items() if own == place]
    others += [name for name, own in WORKER_DYNAMO.items() if f"worker_{own}" == place]
    others += [f"{PREFIX}{name.upper()}" for name in SHARED if f"worker_{name}" == place]
    whole = any(one.startswith(PREFIX) and variable.startswith(f"{one}__") for one in environment)
    itself = variable in environment if variable not in PLACES else environment.get(variable)
    return whole or bool(itself) or any(environment.get(one) for one in others)


def _aliases(place: str) -> Iterator[str]:
    for alias, own in ALIASES.items():
        if f"{alias.rpartition('.')[0]}.{own}" == place:
            yield alias


def arguments(
    path: Path,
    table: Toml,
    flags: Mapping[str, argparse.Action],
    setting_of: Callable[[argparse.Action], str | None],
    given: Sequence[str],
) -> list[str]:
    """Return the table `up` as command-line arguments, without the flags that `given` already contains.

    `flags` holds the command's flags by key. `setting_of` returns the setting that a flag sets, or None if the flag sets no
    setting. Raise BadConfigFile for an unknown key, an invalid value, or a key that belongs in another table."""
    found = []
    for key, value in table.items():
        own = [name for name, action in flags.items() if setting_of(action) is None]
        if key in flags and (setting := setting_of(flags[key])):
            raise BadConfigFile(f"{path}: up.{key} is the setting {setting}: write it there")
        _check_known(path, key, f"{UP}.", own)
        flag = f"--{key.replace('_', '-')}"
        texts = _values(path, f"{UP}.{key}", value, flags[key])
        if not any(word == flag or word.startswith(f"{flag}=") for word in given):
            found += [flag if text is None else f"{flag}={text}" for text in texts]
    return found


def _values(path: Path, name: str, value: Any, action: argparse.Action) -> list[str | None]:
    """Check the value of one flag, and return the values to pass on the command line. Raise BadConfigFile if it is invalid.

    A flag that takes no command-line value is true or false in the file: return [None] for true, [] for false."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise BadConfigFile(f"{path}: {name} = {value!r}: must be true or false")
        return [None] if value else []
    values = value if isinstance(value, list) and isinstance(action.default, list) else [value]
    for one in values:
        try:
            if isinstance(one, bool | list | dict):
                raise ValueError("must be text or a number")
            checked = action.type(str(one)) if callable(action.type) else one
            if action.choices and checked not in action.choices:
                raise ValueError(f"must be one of {', '.join(action.choices)}")
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise BadConfigFile(f"{path}: {name} = {one!r}: {error}") from None
    return [str(one) for one in values]
