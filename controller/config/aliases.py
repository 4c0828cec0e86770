"""Alternative names of settings from the design seeds, accepted wherever settings are read.

The seeds are the designs that Holdfast derives from; docs/concepts/seed-map.md lists them and their names. A seed's setting that
Holdfast fixes is accepted with its fixed value only.
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
    """Return the fields of a section that Dynamo's variables set."""
    places = {variable: place.partition(".") for variable, place in DYNAMO.items()}
    return {
        name: environment[variable]
        for variable, (owner, _, name) in places.items()
        if owner == section and environment.get(variable)
    }


def canonical(section: str, path: Sequence[str]) -> list[str]:
    """Return the path of a setting under its own names, whichever name was used."""
    return [*path[:-1], _own((section, *path))]


def fixed(section: str, path: Sequence[str], value: Any) -> bool:
    """Return whether a setting is a fixed one of the seeds. Raise BadSetting if it is given another value."""
    place = ".".join((section, *path))
    if place not in FIXED:
        return False
    only, why = FIXED[place]
    if str(value) != str(only):
        raise BadSetting(f"{place} = {value!r}: the value is fixed at {only} ({why})")
    return True


def renamed(section: str, values: dict[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a section's values (those below `path`) under their own names, at every depth. Raise BadSetting if a setting is
    given under both names."""
    found: dict[str, Any] = {}
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
    """Return the setting's own name, given a path that ends in any of its names. A model's name in it may contain dots."""
    exact = ALIASES.get(".".join(place))
    return exact or ALIASES.get(".".join((*place[:-2], "*", place[-1]))) or place[-1]
