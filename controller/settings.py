"""Every setting of the controller's side, by section.

Each section is a model beside the code that obeys it; this page only knows where they are. A name that begins with
HOLDFAST_ and is no setting is refused: a misspelt setting must not be silently the default.
"""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from controller.flags import PREFIX, BadSetting, flatten, gather

PLACES = ("HOLDFAST_NATS_URL", "HOLDFAST_DATABASE_URL", "HOLDFAST_DATA")
WORKER_PREFIX = "HOLDFAST_WORKER_"  # read by the worker, which refuses what it does not know


def sections() -> dict[str, type[BaseModel]]:
    """Return the sections of the controller side."""
    from controller.frontend.settings import FrontendSettings
    from controller.runtime.projector_settings import ProjectorSettings
    from controller.runtime.settings import ControllerSettings

    return {"controller": ControllerSettings, "frontend": FrontendSettings, "projector": ProjectorSettings}


def refuse_unknown(environment: Mapping[str, str]) -> None:
    """Raise BadSetting for a HOLDFAST_ variable that no section reads."""
    starts = tuple(f"{PREFIX}{name.upper()}__" for name in ("controller", "frontend", "projector"))
    for variable in environment:
        known = variable in PLACES or variable.startswith((*starts, WORKER_PREFIX))
        if variable.startswith(PREFIX) and not known:
            raise BadSetting(f"{variable} is not a setting; `holdfast settings` lists them all")


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
