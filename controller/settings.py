"""Every setting of the controller's side, by section.

Each section is a model beside the code that obeys it; this page only knows where they are.
"""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from controller.flags import flatten, gather
from controller.variables import PLACES, PREFIX, refuse_unknown


def sections() -> dict[str, type[BaseModel]]:
    """Return the sections of the controller side."""
    from controller.frontend.settings import FrontendSettings
    from controller.runtime.projector_settings import ProjectorSettings
    from controller.runtime.settings import ControllerSettings

    return {"controller": ControllerSettings, "frontend": FrontendSettings, "projector": ProjectorSettings}


def effective(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return every setting's effective value by its dotted name, secrets masked."""
    refuse_unknown(environment)
    found: dict[str, Any] = {}
    for place in PLACES:
        found[place.removeprefix(PREFIX).lower()] = masked(environment.get(place, ""))
    for section, model in sections().items():
        for name, value in flatten(gather(model, section, {}, environment), section):
            found[name] = masked(value) if isinstance(value, str) else value
    return found


def masked(text: str) -> str:
    """Return a URL with its password hidden."""
    return re.sub(r"(?<=://)([^:/@\s]*):([^@/\s]+)@", r"\1:***@", text)
