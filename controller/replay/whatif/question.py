"""Parses and validates the policy changes of a what-if question (`--set`, `--policy`)."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from difflib import get_close_matches
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from controller.deciders.fleet import FleetPolicy, dump, load
from controller.replay.moment_parser import duration_s
from controller.replay.sentences import span
from controller.replay.whatif.course import CourseTerms
from events.errors import UsageError

INTERVAL, SILENCE = "canary.interval", "liveness.silent_after"
# parts of the policy that cannot be changed, because courses use them as recorded
NOT_ASKED = ("golden", "incident")
FILE_BYTES_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """The settings that a what-if question changes, by name.

    Values are plain JSON; a duration is a number of seconds."""

    values: Mapping[str, Any] = field(default_factory=dict)

    def terms(self, place: float = 0.5) -> CourseTerms:
        """Return the parameters of a simulation with the changed settings. `CourseTerms` explains `place`."""
        own = {name: value for name, value in self.values.items() if name not in (INTERVAL, SILENCE)}

        def policy(adopted: Mapping[str, Any]) -> FleetPolicy:
            return load(_with(dump(load(adopted)), own))

        return CourseTerms(policy, self.values.get(INTERVAL), self.values.get(SILENCE), place)

    def also(self, name: str, value: Any) -> "PolicyChange":
        """Return a copy of this policy change in which the setting `name` has the value `value`."""
        return PolicyChange({**self.values, name: value})


def _with(written: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in values.items():
        *parts, last = name.split(".")
        reduce(lambda inside, part: inside.setdefault(part, {}), parts, written)[last] = value
    return written


def _durations() -> set[str]:
    """Return the names of the settings that are durations."""
    policy = FleetPolicy()
    parts = [(part.name, getattr(policy, part.name)) for part in fields(policy)]
    found = {
        f"{name}.{one.name}"
        for name, part in parts
        for one in fields(part)
        if isinstance(getattr(part, one.name), timedelta)
    }
    return found | {INTERVAL, SILENCE}


TIMES = _durations()


def setting(name: str, value: Any) -> str:
    """Format a setting's value as text. A duration gets its unit."""
    return span(value) if name in TIMES and isinstance(value, int | float) else str(value)


def known() -> dict[str, Any]:
    """Return the defaults of all settings that a what-if question can change, by name. A duration is in seconds."""
    found: dict[str, Any] = {INTERVAL: 30.0, SILENCE: 3.0}
    for part, settings in dump(FleetPolicy()).items():
        if part not in NOT_ASKED:
            found |= {
                f"{part}.{name}": value for name, value in settings.items() if not isinstance(value, dict)
            }
    return found


def parse_changes(sets: Sequence[str], file: str | None) -> PolicyChange:
    """Parse the values of `--set NAME=VALUE` and `--policy FILE` into a policy change.

    `--set` takes precedence over the file. Raise UsageError if a setting or value is invalid."""
    values = _file(Path(file)) if file else {}
    for one in sets:
        name, is_, value = one.partition("=")
        if not is_ or not value:
            raise UsageError(f"--set {one}: must be NAME=VALUE, such as --set canary.interval=10s")
        values[_name(name.strip(), "--set")] = value_of(value.strip())
    return checked(PolicyChange(values))


def checked(what: PolicyChange) -> PolicyChange:
    """Return the policy change unchanged. Raise UsageError if one of its values is invalid."""
    for name in (INTERVAL, SILENCE):
        value = what.values.get(name)
        if value is not None and not (isinstance(value, int | float) and value > 0):
            raise UsageError(f"{name} is {value!r}: it must be a duration above 0, such as 10s")
    own = {name: value for name, value in what.values.items() if name not in (INTERVAL, SILENCE)}
    try:
        TypeAdapter(FleetPolicy).validate_python(_with(dump(FleetPolicy()), own))
    except ValidationError as error:
        found = error.errors()[0]
        where = ".".join(str(part) for part in found["loc"]) or "the policy"
        given = "" if isinstance(found["input"], dict) else f", not {found['input']!r}"
        raise UsageError(f"{where}: {found['msg'].removeprefix('Value error, ')}{given}") from None
    return what


def _name(given: str, where: str) -> str:
    """Return the canonical name of the setting that the user named `given`.

    The prefixes `controller.` and `policy.` and the suffix `_s` are optional. Raise UsageError if no such setting exists; the
    error names the flag or file `where`."""
    name, names = given.removeprefix("controller.").removeprefix("policy."), known()
    for one in (name, name.removesuffix("_s")):
        if one in names or one.startswith("degradation.slos."):
            return one
    if name.partition(".")[0] in NOT_ASKED:
        raise UsageError(
            f"{where} {given}: goldens and incidents are used as recorded, and cannot be changed"
        )
    near = get_close_matches(name, names, 3, 0.5) or sorted(names)
    raise UsageError(f"{where} {given}: no such setting. Did you mean one of {', '.join(near)}")


def value_of(text: str) -> Any:
    """Parse a setting's value to plain JSON. `10s` becomes a number of seconds, and `none` becomes None."""
    if (seconds := duration_s(text)) is not None:
        return seconds
    try:
        return json.loads(text)
    except ValueError:
        return None if text.lower() in ("none", "never") else text


def _file(path: Path) -> dict[str, Any]:
    """Read a policy from a JSON or TOML file, and return the settings by name.

    The file groups the settings by part, in the form in which `holdfast replay report -o json` prints a policy. Raise
    UsageError if the file is invalid."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise UsageError(f"--policy {path}: larger than {FILE_BYTES_MAX:,} bytes")
        text = path.read_text(encoding="utf-8")
        written = tomllib.loads(text) if path.suffix.lower() == ".toml" else json.loads(text)
    except OSError as error:
        raise UsageError(f"--policy {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise UsageError(
            f"--policy {path}: neither valid JSON nor (with the suffix .toml) valid TOML: {error}"
        ) from None
    if not isinstance(written, dict):
        raise UsageError(
            f"--policy {path}: must be an object of parts, such as {{'breaker': {{'wait_min': 10}}}}"
        )
    found: dict[str, Any] = {}
    for part, settings in written.items():
        if part in NOT_ASKED:
            continue  # not an error, because a policy copied from a report contains these parts
        if not isinstance(settings, dict):
            raise UsageError(f"--policy {path}: {part} is {settings!r}, but must be an object of settings")
        for name, value in settings.items():
            given = _name(f"{part}.{name}", f"--policy {path}:")
            found[given] = value_of(value) if isinstance(value, str) else value
    return found
