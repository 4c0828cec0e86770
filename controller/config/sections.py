"""Every setting of the controller's side, by section.

Each section is a model beside the code that obeys it; this page only knows where they are.
"""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from controller.config.flags import flatten, gather
from controller.config.variables import PLACES, PREFIX, SECTIONS, refuse_unknown


def section(role: str) -> type[BaseModel]:
    """Return the section that a role reads. The others' are not imported: pydantic takes its time over each. Raise
    KeyError for a name that is no role's."""
    match role:
        case "controller":
            from controller.runtime.settings import ControllerSettings

            return ControllerSettings
        case "frontend":
            from controller.frontend.settings import FrontendSettings

            return FrontendSettings
        case "projector":
            from controller.runtime.projection.settings import ProjectorSettings

            return ProjectorSettings
        case "planner":
            from controller.runtime.planning.settings import PlannerSettings

            return PlannerSettings
        case "notifier":
            from controller.webhooks.settings import NotifierSettings

            return NotifierSettings
    raise KeyError(role)


def effective(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return every setting's effective value by its dotted name, secrets masked. Raise BadSetting."""
    refuse_unknown(environment)
    found: dict[str, Any] = {}
    for place in PLACES:
        found[place.removeprefix(PREFIX).lower()] = masked(environment.get(place, ""))
    for role in SECTIONS:
        for name, value in flatten(gather(section(role), role, {}, environment), role):
            found[name] = masked(value) if isinstance(value, str) else value
    return found


def masked(text: str) -> str:
    """Return a URL with its password hidden."""
    return re.sub(r"(?<=://)([^:/@\s]*):([^@/\s]+)@", r"\1:***@", text)
