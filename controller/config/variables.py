"""The names of Holdfast's environment variables, and a check that rejects misspelt ones."""

from collections.abc import Mapping

from events.errors import BadSetting

PREFIX = "HOLDFAST_"
PLACES = (
    "HOLDFAST_NATS_URL",
    "HOLDFAST_DATABASE_URL",
    "HOLDFAST_DATA",
    "HOLDFAST_FLEET_KEY_FILE",
    "HOLDFAST_ADMIN_HOSTS",
)
WORKER_PREFIX = "HOLDFAST_WORKER_"  # read by the worker, which rejects unknown names
SECTIONS = ("controller", "frontend", "projector", "planner", "notifier")


def refuse_unknown(environment: Mapping[str, str]) -> None:
    """Raise BadSetting if the environment has a variable with the prefix HOLDFAST_ that no role reads."""
    starts = tuple(f"{PREFIX}{name.upper()}__" for name in SECTIONS)
    for variable in environment:
        known = variable in PLACES or variable.startswith((*starts, WORKER_PREFIX))
        if variable.startswith(PREFIX) and not known:
            raise BadSetting(f"{variable} is not a setting; `holdfast settings` lists them all")
