"""Which of a fleet's workers are not there, and why, by what `holdfast status` says?"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from controller.deciders.worker import SPARE

NAMED_MAX = 3  # workers that a line names; more that wait for the same are counted


def absent(names: Sequence[str], status: Mapping[str, Any], *, outside: bool) -> dict[str, str]:
    """Return which of these workers neither take requests nor are spares that are ready to, and why. `outside`: only who waits
    for something outside of the fleet, which deals with all else itself."""
    known = {worker["id"]: worker for worker in status["workers"]}
    waiting = {one["id"]: str(one["reason"]) for one in status.get("awaited", ())}
    found: dict[str, str] = {}
    for name in names:
        if name in waiting:
            found[name] = waiting[name]
        elif not outside and (why := _why_not(known.get(name))):
            found[name] = why
    return found


def _why_not(worker: Mapping[str, Any] | None) -> str:
    """Return why a worker takes no requests; nothing if it does."""
    if worker is None:
        return "its process has not been heard of yet"
    why = [reason for reason in worker.get("reasons") or () if reason != SPARE]
    if worker["weight"] or (worker.get("spare") and not why):
        return ""
    return "; ".join(why) or "it takes no requests yet"


def lines(missing: Mapping[str, str]) -> Iterator[str]:
    """Yield one line for each reason, with those for whom it holds."""
    alike: dict[str, list[str]] = {}
    for name, why in missing.items():
        alike.setdefault(why, []).append(name)
    for why, names in alike.items():
        named = ", ".join(names[:NAMED_MAX])
        more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
        yield f"{named}{more} {'is' if len(names) == 1 else 'are'} awaited: {why}"
