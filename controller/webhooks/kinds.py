"""The event kinds that a webhook sends: by default those that an operator should know."""

from collections.abc import Iterable
from difflib import get_close_matches

from events import codec

DEFAULT_KINDS = (
    "incident_opened",
    "incident_closed",
    "breaker_opened",
    "degradation_changed",
    "spare_activated",
    "golden_disputed",
    "exposure_unknown",
    "panic_began",
    "panic_ended",
    "observer_blind",
    "worker_lingered",
    "intrusion_refused",
)
"""The default kinds. An incident is about a worker that is suspicious, convicted, broken or dead, or about a model with too
little capacity. It closes when the worker or model is healthy again, or the worker is gone for good."""
ALL = "all"


def checked(kinds: Iterable[str]) -> tuple[str, ...]:
    """Return validated kinds; the default kinds if none are given. Raise ValueError for an unknown one."""
    wanted = tuple(dict.fromkeys(kinds))
    if wanted == (ALL,):
        return tuple(sorted(codec.KINDS))
    for name in wanted:
        if name not in codec.KINDS:
            near = get_close_matches(name, codec.KINDS, n=3, cutoff=0.5)
            meant = f"did you mean {' or '.join(near)}? " if near else ""
            raise ValueError(f"unknown kind {name!r}: {meant}docs/reference/events.md lists all kinds")
    return wanted or DEFAULT_KINDS
