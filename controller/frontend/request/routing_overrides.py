"""Parses the `X-Holdfast-Router-…` headers, which override router settings for one request.

Each header is named like the corresponding flag. An unknown header or an invalid value is rejected, because ignoring
an override silently is worse than an error.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from pydantic import ValidationError

from controller.frontend.errors import ApiError, invalid
from controller.frontend.settings import RouterSettings

PREFIX = "X-Holdfast-Router-"
EXPLAIN = "X-Holdfast-Explain"  # 1: explain the choice of the worker in the response header of the same name
OVERRIDABLE = (
    "mode",
    "temperature",
    "kv_overlap_score_credit",
    "kv_overlap_score_credit_decay",
    "prefill_load_scale",
    "decode_active_request_weight",
    "active_request_tokens",
    "recent_prefill_weight",
    "host_cache_hit_weight",
    "disk_cache_hit_weight",
    "track_prefill_tokens",
    "track_active_blocks",
    "assume_kv_reuse",
)  # the other router settings affect more than one request
SHOWN_MAX = 40  # characters of a value quoted in a message
_START = b"x-holdfast-"
_ROUTER = "router-"
_EXPLAIN = "explain"


@dataclass(frozen=True, slots=True)
class RoutingOverrides:
    """The router settings that one request overrides, and whether its routing is explained."""

    router: RouterSettings | None = None  # None: the frontend's settings
    explain: bool = False  # report why the request's first worker was chosen


NO_OVERRIDES = RoutingOverrides()


def read_overrides(headers: Iterable[tuple[bytes, bytes]], ours: RouterSettings) -> RoutingOverrides:
    """Parse the overrides in a request's headers.

    `ours` are the frontend's settings. If a header is unknown or invalid, raise ApiError (400) that names the header.
    """
    found = [(name, value) for name, value in headers if name[: len(_START)].lower() == _START]
    if not found:
        return NO_OVERRIDES
    values: dict[str, str] = {}
    for name, value in found:
        key = name[len(_START) :].decode("latin-1").lower()
        if key in values and (key == _EXPLAIN or key.startswith(_ROUTER)):
            named = EXPLAIN if key == _EXPLAIN else header(_shown(key.removeprefix(_ROUTER)))
            raise invalid(f"the header {named} is given more than once", named)
        values[key] = value.decode("latin-1").strip()
    explain = values.get(_EXPLAIN, "0")
    if explain not in ("0", "1"):
        raise invalid(f"the header {EXPLAIN} is {_shown(explain)!r}: it must be 0 or 1", EXPLAIN)
    changes = tuple(
        (key.removeprefix(_ROUTER).replace("-", "_"), value)
        for key, value in values.items()
        if key.startswith(_ROUTER)
    )
    return RoutingOverrides(overridden(ours, changes) if changes else None, explain == "1")


@lru_cache(maxsize=256)
def overridden(ours: RouterSettings, overrides: tuple[tuple[str, str], ...]) -> RouterSettings:
    """Return the frontend's settings with these overrides applied.

    If an override is invalid, raise ApiError (400) that names the header. The validated result is cached, because
    clients send the same few headers with every request.
    """
    for name, _ in overrides:
        if name not in OVERRIDABLE:
            raise _refused(name, f"is unknown; available are {', '.join(header(one) for one in OVERRIDABLE)}")
    try:
        return RouterSettings.model_validate(ours.model_dump() | dict(overrides))
    except ValidationError as error:
        wrong = error.errors()[0]
        name, value = str(wrong["loc"][0]), dict(overrides)[str(wrong["loc"][0])]
        raise _refused(name, f"is {_shown(value)!r}: {wrong['msg'][0].lower()}{wrong['msg'][1:]}") from error


def header(name: str) -> str:
    """Return the name of the header that overrides the setting `name`."""
    return PREFIX + "-".join(part.capitalize() for part in name.replace("_", "-").split("-"))


def _refused(name: str, why: str) -> ApiError:
    named = header(_shown(name))
    return invalid(f"the header {named} {why}", named)


def _shown(text: str) -> str:
    return "".join(c for c in text[:SHOWN_MAX] if c.isprintable())
