"""Which events does a webhook tell of? Those that a person wants to hear of, unless he names others."""

from collections.abc import Iterable
from difflib import get_close_matches

from events import codec

TOLD = (
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
"""What is told where nobody says otherwise. An incident is a worker's that is suspicious, convicted, broken or dead, or a model's
that has not capacity enough: it is closed when that is well again, or gone for good."""
ALL = "all"


def checked(kinds: Iterable[str]) -> tuple[str, ...]:
    """Return kinds as they are followed; of none, those that a person wants to hear of. Raise ValueError for an unknown one."""
    wanted = tuple(dict.fromkeys(kinds))
    if wanted == (ALL,):
        return tuple(sorted(codec.KINDS))
    for name in wanted:
        if name not in codec.KINDS:
            near = get_close_matches(name, codec.KINDS, n=3, cutoff=0.5)
            meant = f"did you mean {' or '.join(near)}? " if near else ""
            raise ValueError(f"there is no kind {name!r}: {meant}docs/events.md has all of them")
    return wanted or TOLD
