"""The seeds' names of settings that have other names here, accepted wherever settings are given. docs/seed-map.md lists them.

What the seeds let one set and is fixed here is accepted with the value that it has.
"""

from collections.abc import Mapping, Sequence
from typing import Any

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
"""A place in the settings, as a seed names its last part, and that part's name here. `*`: any model."""

FIXED: Mapping[str, tuple[int, str]] = {
    "controller.policy.breaker.half_open_max_calls": (1, "one trial at a time, with a deadline"),
    "controller.policy.breaker.success_threshold": (
        1,
        "one trial that passes closes it; the ramp does the rest",
    ),
    "frontend.breaker.half_open_max_calls": (1, "one trial at a time, with a deadline"),
    "frontend.breaker.success_threshold": (1, "one trial that passes closes it"),
}
"""What the seeds let one set, the only value that there is here, and why."""


DYNAMO: Mapping[str, str] = {
    "DYN_ADMISSION_CONTROL": "frontend.admission_control",
    "DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD": "frontend.active_decode_blocks_threshold",
    "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD": "frontend.active_prefill_tokens_threshold",
    "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC": "frontend.active_prefill_tokens_threshold_frac",
    "DYN_HTTP_OVERLOAD_STATUS_CODE": "frontend.overload_status_code",
}
"""NVIDIA Dynamo's variables for what is the same here. Ours win."""


def from_dynamo(section: str, environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the fields of a section that Dynamo's variables set."""
    places = {variable: place.partition(".") for variable, place in DYNAMO.items()}
    return {
        name: environment[variable]
        for variable, (whose, _, name) in places.items()
        if whose == section and environment.get(variable)
    }


def canonical(section: str, path: Sequence[str]) -> list[str]:
    """Return where a setting stands, by its own names, whichever it was given by."""
    return [*path[:-1], _own((section, *path))]


def fixed(section: str, path: Sequence[str], value: Any) -> bool:
    """Return whether a setting is one of the seeds' that is fixed here. Raise BadSetting if it is to be another."""
    place = ".".join((section, *path))
    if place not in FIXED:
        return False
    only, why = FIXED[place]
    if str(value) != str(only):
        raise BadSetting(f"{place} = {value!r}: here it is {only}, always ({why})")
    return True


def renamed(section: str, values: dict[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a section's values (those below `path`) by their own names, at every depth. Raise BadSetting where both names of
    one are given."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        here = (*path, name)
        if fixed(section, here, value):
            continue
        own = _own((section, *here))
        if own in found or (own != name and own in values):
            place = ".".join((section, *path, own))
            raise BadSetting(f"{place} is given twice, once as {name}: one of the two is enough")
        found[own] = renamed(section, value, here) if isinstance(value, dict) else value
    return found


def _own(place: Sequence[str]) -> str:
    """Return the own name of the last part of a place. A model's name may have dots in it."""
    exact = ALIASES.get(".".join(place))
    return exact or ALIASES.get(".".join((*place[:-2], "*", place[-1]))) or place[-1]
