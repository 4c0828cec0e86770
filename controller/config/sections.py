"""Finds the settings section of each role, and lists all effective settings.

Each section is a pydantic model in the package that uses it.
"""

import re
from collections.abc import Mapping
from importlib import import_module

from pydantic import BaseModel

from controller.config.flags import flatten, gather
from controller.config.variables import PLACES, PREFIX, SECTIONS, refuse_unknown

_MODELS = {
    "controller": ("controller.runtime.settings", "ControllerSettings"),
    "frontend": ("controller.frontend.settings", "FrontendSettings"),
    "projector": ("controller.runtime.settings", "ProjectorSettings"),
    "planner": ("controller.runtime.settings", "PlannerSettings"),
    "notifier": ("controller.webhooks.settings", "NotifierSettings"),
}


def section(role: str) -> type[BaseModel]:
    """Return the settings section of a role. Raise KeyError for an unknown role.

    Only the module of that section is imported, because building pydantic models takes time.
    """
    module, name = _MODELS[role]
    found: type[BaseModel] = getattr(import_module(module), name)
    return found


def effective(environment: Mapping[str, str]) -> dict[str, object]:
    """Return every setting's effective value by dotted name, with passwords in URLs masked.

    Raise BadSetting if the environment sets an unknown or invalid setting.
    """
    refuse_unknown(environment)
    found: dict[str, object] = {}
    for place in PLACES:
        found[place.removeprefix(PREFIX).lower()] = masked(environment.get(place, ""))
    for role in SECTIONS:
        for name, value in flatten(gather(section(role), role, {}, environment), role):
            found[name] = masked(value) if isinstance(value, str) else value
    return found


def masked(text: str) -> str:
    """Return a text with the password of every URL in it masked."""
    return re.sub(r"(?<=://)([^:/@\s]*):([^@/\s]+)@", r"\1:***@", text)
