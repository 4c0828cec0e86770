"""All settings of the deciders, and their conversion to and from the form that the journal stores.

A `PolicyAdopted` event carries the policy as plain JSON values. `replay verify` can therefore repeat each recorded decision
with the policy that applied to that decision.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import timedelta
from functools import cached_property
from types import NoneType, UnionType
from typing import Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from controller.deciders.breaker import BreakerPolicy
from controller.deciders.budget import BudgetPolicy
from controller.deciders.degradation import DegradationPolicy
from controller.deciders.drain import DrainPolicy
from controller.deciders.golden import GoldenPolicy
from controller.deciders.health_state import HealthPolicy
from controller.deciders.incident import IncidentPolicy
from controller.deciders.spares import SparesPolicy
from controller.deciders.validation import STRICT
from controller.deciders.worker_removal import ForgettingPolicy

T = TypeVar("T")
Written: TypeAlias = dict[str, Any]  # plain JSON values


@dataclass(frozen=True)
class FleetPolicy:
    """The settings of all state machines of the deciders."""

    health: HealthPolicy = field(default_factory=HealthPolicy)
    breaker: BreakerPolicy = field(default_factory=BreakerPolicy)
    budget: BudgetPolicy = field(default_factory=BudgetPolicy)
    drain: DrainPolicy = field(default_factory=DrainPolicy)
    degradation: DegradationPolicy = field(default_factory=DegradationPolicy)
    golden: GoldenPolicy = field(default_factory=GoldenPolicy)
    incident: IncidentPolicy = field(default_factory=IncidentPolicy)
    forgetting: ForgettingPolicy = field(default_factory=ForgettingPolicy)
    spares: SparesPolicy = field(default_factory=SparesPolicy)
    __pydantic_config__ = STRICT

    @cached_property
    def adopted(self) -> Written:
        """This policy in plain JSON values, as `PolicyAdopted` carries it.

        Cached, because each computation of decisions compares it with the policy in force.
        """
        written: dict[str, Written] = dump(self)
        parts = {name: _without(part, ABSENT.get(name, {})) for name, part in written.items()}
        return {name: part for name, part in parts.items() if part}

    def at(self, version: int) -> "FleetPolicy":
        """Return this policy as deciders of an older version apply it.

        Each setting that was added after `version` gets the value that preserves the behaviour of that version.
        """
        if version not in self._at:
            parts = {name: (getattr(self, name), values) for name, values in _since(version).items()}
            former = {name: _load(type(part), {**dump(part), **was}) for name, (part, was) in parts.items()}
            self._at[version] = replace(self, **former)
        return self._at[version]

    @cached_property
    def _at(self) -> dict[int, "FleetPolicy"]:
        return {}


OLDEST = 5
"""The oldest version of the deciders that this release can apply. If the fleet has an older version, the leader adopts
OLDEST, with the event kinds that the fleet knows."""

BEFORE: Mapping[int, Mapping[str, Written]] = {
    5: {"forgetting": {"forget_after": None}, "spares": {"on_return": "swap"}},
    6: {
        "breaker": {"silence_ends_wait": False, "soft_timeouts": False},
        "budget": {"keep_last": False},
        "degradation": {"exit_at_provisioned": False, "tolerance": 0.0},
        "golden": {"outvote": False, "tie_margin": 0.0, "hold_new_lineage": False},
        "health": {"eject_intruders": False, "soft_timeouts": False, "silence_returns_whole": False},
    },
}
"""The policy values that preserve the behaviour from before each version of the deciders.

The keys are version, state machine and field. The values have the form of `dump`. A changed decider has a new field in its
policy, defaulting to the new behaviour, and an entry here. A fleet that still has processes of an older version therefore
decides by `FleetPolicy.at`, and `replay verify` repeats a recorded decision with the policy of that time.
"""


def _merged(versions: Iterable[int]) -> dict[str, Written]:
    found: dict[str, Written] = {}
    for version in sorted(versions, reverse=True):  # the earliest version overrides the later ones
        for name, values in BEFORE[version].items():
            found.setdefault(name, {}).update(values)
    return found


def _since(version: int) -> dict[str, Written]:
    return _merged(since for since in BEFORE if since > version)


ABSENT: Mapping[str, Written] = _merged(BEFORE)
"""The values of fields that a stored policy lacks. They preserve the behaviour from before the fields existed.

`FleetPolicy.adopted` omits a field with this value, so a policy without the field stays equal.
"""


def _without(part: Written, before: Written) -> Written:
    return {name: value for name, value in part.items() if name not in before or value != before[name]}


def dump(value: object) -> Any:
    """Return a policy, or a value in it, as plain JSON values. Durations become seconds."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: dump(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return {str(key): dump(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [dump(item) for item in value]
    return value


def load(written: Mapping[str, Any]) -> FleetPolicy:
    """Return the policy that `dump` has written. Raise ValueError for an invalid value.

    Unknown names are ignored. A missing setting gets its default or, if `ABSENT` lists the setting, the value in `ABSENT`. That
    value preserves the behaviour from before the setting existed, so the replay of an old journal gives the same decisions.
    """
    absent = {name: {**values, **written.get(name, {})} for name, values in ABSENT.items()}
    return _load(FleetPolicy, {**written, **absent})


def _load(kind: type[T], written: Mapping[str, object]) -> T:
    hints = get_type_hints(kind)
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: _value(hints[name], value) for name, value in written.items() if name in known})


def _value(hint: object, value: Any) -> Any:
    if isinstance(hint, UnionType):
        options = [option for option in get_args(hint) if option is not NoneType]
        return None if value is None else _value(options[0], value)
    if hint is timedelta:
        return timedelta(seconds=value)
    if is_dataclass(hint) and isinstance(hint, type):
        return _load(hint, value)
    if get_origin(hint) is tuple:
        return tuple(value)
    if isinstance(value, Mapping):
        of = get_args(hint)[1] if get_args(hint) else object
        return {key: _value(of, item) for key, item in value.items()}
    return float(value) if hint is float else value
