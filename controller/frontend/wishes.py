"""What does a client wish for the choice of its worker? The headers `X-Holdfast-Router-…`, named as the flags are.

They lie over the frontend's own settings for this request alone. A header that is none of them, or whose value makes no
sense, is refused: a wish that is silently not obeyed is worse than an error.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from pydantic import ValidationError

from controller.frontend.errors import ApiError, invalid
from controller.frontend.settings import RouterSettings

PREFIX = "X-Holdfast-Router-"
EXPLAIN = "X-Holdfast-Explain"  # 1: say in the answer's header of the same name why this worker was chosen
WISHES = (
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
)  # the rest of the settings is about more than one request
SHOWN_MAX = 40  # characters of a value, in a message
_START = b"x-holdfast-"
_ROUTER = "router-"
_EXPLAIN = "explain"


@dataclass(frozen=True, slots=True)
class Wishes:
    """What one request wants of the router."""

    router: RouterSettings | None = None  # None: as the frontend does it
    explain: bool = False  # why its first worker was chosen


NO_WISHES = Wishes()


def read_wishes(headers: Iterable[tuple[bytes, bytes]], ours: RouterSettings) -> Wishes:
    """Return what a request with these headers wishes for. Raise ApiError, naming the header."""
    found = [(name, value) for name, value in headers if name[: len(_START)].lower() == _START]
    if not found:
        return NO_WISHES
    wishes: dict[str, str] = {}
    for name, value in found:
        wish = name[len(_START) :].decode("latin-1").lower()
        if wish in wishes and (wish == _EXPLAIN or wish.startswith(_ROUTER)):
            named = EXPLAIN if wish == _EXPLAIN else header(_shown(wish.removeprefix(_ROUTER)))
            raise invalid(f"the header {named} is given more than once", named)
        wishes[wish] = value.decode("latin-1").strip()
    explain = wishes.get(_EXPLAIN, "0")
    if explain not in ("0", "1"):
        raise invalid(f"the header {EXPLAIN} is {_shown(explain)!r}: it must be 1, or 0", EXPLAIN)
    changes = tuple(
        (wish.removeprefix(_ROUTER).replace("-", "_"), value)
        for wish, value in wishes.items()
        if wish.startswith(_ROUTER)
    )
    return Wishes(wished(ours, changes) if changes else None, explain == "1")


@lru_cache(maxsize=256)
def wished(ours: RouterSettings, wishes: tuple[tuple[str, str], ...]) -> RouterSettings:
    """Return our settings with these laid over them. Raise ApiError, naming the header that means the same."""
    for name, _ in wishes:
        if name not in WISHES:
            raise _refused(name, f"is not known; there are {', '.join(header(one) for one in WISHES)}")
    try:
        return RouterSettings.model_validate(ours.model_dump() | dict(wishes))
    except ValidationError as error:
        wrong = error.errors()[0]
        name, value = str(wrong["loc"][0]), dict(wishes)[str(wrong["loc"][0])]
        raise _refused(name, f"is {_shown(value)!r}: {wrong['msg'][0].lower()}{wrong['msg'][1:]}") from error


def header(name: str) -> str:
    """Return the header that sets this field of the settings."""
    return PREFIX + "-".join(part.capitalize() for part in name.replace("_", "-").split("-"))


def _refused(name: str, why: str) -> ApiError:
    named = header(_shown(name))
    return invalid(f"the header {named} {why}", named)


def _shown(text: str) -> str:
    return "".join(c for c in text[:SHOWN_MAX] if c.isprintable())
